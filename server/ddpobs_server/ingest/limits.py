"""How much a client may send, and how much may be under way at once. The settings say how much; see `Settings`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpobs import wire
from ddpobs_server.settings import Settings
from ddpobs_server.web.problems import Problem

_FACTS, _FACTS_LENGTH = 100, 16_384
"""Entries of a mapping that a client fills, and its characters: each source's is read with all others' of its run."""


def check_batch(batch: wire.Batch, settings: Settings) -> None:
    """Refuse a batch of a size that no training sends.

    Raises:
        Problem: 413 with too many records or names; 422 with too large a world, too many layouts, or too long a name.
    """
    _at_most("world_size", batch.world_size, settings.max_ranks, "MAX_RANKS")
    rows = wire.records(batch) + sum(len(told.ready_ns) for told in batch.readiness)
    rows += sum(len(told.rank) for told in batch.peers)
    if rows > settings.max_records:
        raise _too_many("records", rows, settings.max_records, "MAX_RECORDS")
    for layout in batch.layouts:
        _at_most("layouts.revision", layout.revision + 1, settings.max_layouts, "MAX_LAYOUTS")
        _at_most("layouts.buckets", len(layout.buckets), settings.max_buckets, "MAX_BUCKETS")
    for field in ("layouts", "unused", "readiness"):
        for told in getattr(batch, field):
            _at_most(f"{field}.module", told.module + 1, settings.max_layouts, "MAX_LAYOUTS")
    for field in ("spans", "comms"):
        columns = getattr(batch, field)
        if columns is not None and len(columns):
            _at_most(f"{field}.module", int(columns.module.max()) + 1, settings.max_layouts, "MAX_LAYOUTS")
    if batch.spans is not None and len(batch.spans):
        _at_most("spans.revision", int(batch.spans.revision.max()) + 1, settings.max_layouts, "MAX_LAYOUTS")
        _at_most("spans.bucket", int(batch.spans.bucket.max()) + 1, settings.max_buckets, "MAX_BUCKETS")
    for field, facts in _facts(batch):
        for what, limit, came in (
            ("entries", _FACTS, len(facts)),
            ("characters", _FACTS_LENGTH, sum(map(len, _texts(facts)))),
        ):
            if came > limit:
                expected = f"at most {limit} {what}"
                detail = f"{field}: expected {expected}, got {came}"
                raise Problem(422, "Beyond a limit", detail, field=field, expected=expected, came=str(came))
    if batch.layouts or batch.unused or batch.events or batch.hello is not None:
        names = list(_names(batch))
        if len(names) > settings.max_names:
            raise _too_many("names", len(names), settings.max_names, "MAX_NAMES")
        _at_most("names", max(map(len, names), default=0), settings.max_name_length, "MAX_NAME_LENGTH")


def _facts(batch: wire.Batch) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What a client says of itself and of its events, in words of its own."""
    if (hello := batch.hello) is not None:
        yield from (("hello.versions", hello.versions), ("hello.settings", hello.settings))
    yield from (("events.detail", event.detail) for event in batch.events)


def _names(batch: wire.Batch) -> Iterator[str]:
    """Every text that a client chose."""
    if (hello := batch.hello) is not None:
        yield from (hello.host, hello.device, hello.backend)
        yield from _texts(hello.versions)
        yield from _texts(hello.settings)
    for layout in batch.layouts:
        yield from (layout.name, layout.comm)
        for bucket in layout.buckets:
            yield bucket.dtype
            yield from (parameter.name for parameter in bucket.parameters)
    for unused in batch.unused:
        yield from unused.locally
        yield from unused.globally
    for event in batch.events:
        yield event.kind
        yield from _texts(event.detail)


def _texts(facts: Mapping[str, Any]) -> Iterator[str]:
    yield from facts
    yield from (value for value in facts.values() if isinstance(value, str))


def _at_most(field: str, came: int, limit: int, setting: str) -> None:
    if came > limit:
        detail = f"{field}: expected at most {limit} (DDPOBS_SERVER_{setting}), got {came}"
        raise Problem(422, "Beyond a limit", detail, field=field, expected=f"at most {limit}", came=str(came))


def _too_many(what: str, came: int, limit: int, setting: str) -> Problem:
    return Problem(413, "Batch too large", f"at most {limit} {what} a batch (DDPOBS_SERVER_{setting}), got {came}")
