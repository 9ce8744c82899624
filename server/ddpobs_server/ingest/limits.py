"""Refuse batches beyond the size limits of `Settings`.

Everything that a client sends is bounded where its size is first known: headers in `web/bounded_protocol.py`; the body,
the memory of batches in flight and the admission of sources in this folder; values that no process can have measured in
`ddpobs.wire.checks`. None of these checks costs time per span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpobs import wire
from ddpobs_server.settings import Settings
from ddpobs_server.web.problems import Problem

_MAX_FACTS, _MAX_FACTS_LENGTH = 100, 16_384
"""Maximum number of entries and characters of a mapping that a client fills: reads load those of all sources."""
_LONG_FACTS = ("message", "traceback", "output")
"""Facts of an event that are no names, and as long as the mapping may be."""


def check_batch(batch: wire.Batch, settings: Settings) -> None:
    """Refuse a batch of a size that no training sends.

    Raises:
        Problem: 413 for too many records or names; 422 for too large a world, too many layouts, or too long a name.
    """
    _check_at_most("world_size", batch.world_size, settings.max_ranks, "MAX_RANKS")
    _check_records(batch, settings)
    _check_modules(batch, settings)
    for field, facts in _facts(batch):
        _check_facts(field, facts)
    if batch.layouts or batch.unused or batch.events or batch.fingerprints or batch.hello is not None:
        _check_names(batch, settings)


def _check_records(batch: wire.Batch, settings: Settings) -> None:
    records = wire.records(batch) + sum(len(readiness.ready_ns) for readiness in batch.readiness)
    records += sum(len(peers.rank) for peers in batch.peers)
    records += sum(len(sample.names) + len(sample.buffer_names) for sample in batch.fingerprints)
    if records > settings.max_records:
        raise _too_many("records", records, settings.max_records, "MAX_RECORDS")


def _check_modules(batch: wire.Batch, settings: Settings) -> None:
    """Check module, revision and bucket numbers; all count from 0.

    The number of a module that only some ranks have is a multiple of the world size plus its lowest rank.
    """
    modules = settings.max_layouts * batch.world_size
    for layout in batch.layouts:
        _check_at_most("layouts.revision", layout.revision + 1, settings.max_layouts, "MAX_LAYOUTS")
        _check_at_most("layouts.buckets", len(layout.buckets), settings.max_buckets, "MAX_BUCKETS")
    for sample in batch.fingerprints:
        module = wire.module_of_replicas(sample.module, batch.world_size)
        _check_at_most("fingerprints.module", module + 1, modules, "MAX_LAYOUTS")
    for field in ("layouts", "unused", "readiness"):
        for record in getattr(batch, field):
            _check_at_most(f"{field}.module", record.module + 1, modules, "MAX_LAYOUTS")
    for field in ("spans", "comms"):
        columns = getattr(batch, field)
        if columns is not None and len(columns):
            _check_at_most(f"{field}.module", columns.ends("module")[1] + 1, modules, "MAX_LAYOUTS")
    if batch.spans is not None and len(batch.spans):
        _check_at_most("spans.revision", batch.spans.ends("revision")[1] + 1, settings.max_layouts, "MAX_LAYOUTS")
        _check_at_most("spans.bucket", batch.spans.ends("bucket")[1] + 1, settings.max_buckets, "MAX_BUCKETS")


def _check_facts(field: str, facts: Mapping[str, Any]) -> None:
    for unit, limit, size in (
        ("entries", _MAX_FACTS, len(facts)),
        ("characters", _MAX_FACTS_LENGTH, sum(map(len, _texts(facts)))),
    ):
        if size > limit:
            raise _beyond_limit(field, f"at most {limit} {unit}", size)


def _check_names(batch: wire.Batch, settings: Settings) -> None:
    names = list(_names(batch))
    if len(names) > settings.max_names:
        raise _too_many("names", len(names), settings.max_names, "MAX_NAMES")
    _check_at_most("names", max(map(len, names), default=0), settings.max_name_length, "MAX_NAME_LENGTH")


def _facts(batch: wire.Batch) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The batch's mappings with keys of the client's choice, each with its field's name."""
    if (hello := batch.hello) is not None:
        yield from (("hello.versions", hello.versions), ("hello.settings", hello.settings))
    yield from (("events.detail", event.detail) for event in batch.events)


def _names(batch: wire.Batch) -> Iterator[str]:
    """Every text that the client chose, but for those that are no names."""
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
    for sample in batch.fingerprints:
        yield from sample.names
        yield from sample.buffer_names
    for event in batch.events:
        yield event.kind
        yield from _texts({name: fact for name, fact in event.detail.items() if name not in _LONG_FACTS})


def _texts(facts: Mapping[str, Any]) -> Iterator[str]:
    yield from facts
    yield from (value for value in facts.values() if isinstance(value, str))


def _check_at_most(field: str, value: int, limit: int, setting: str) -> None:
    if value > limit:
        raise _beyond_limit(field, f"at most {limit}", value, f" (DDPOBS_SERVER_{setting})")


def _beyond_limit(field: str, expected: str, value: int, setting: str = "") -> Problem:
    detail = f"{field}: expected {expected}{setting}, got {value}"
    return Problem(422, "Beyond a limit", detail, field=field, expected=expected, came=str(value))


def _too_many(records: str, count: int, limit: int, setting: str) -> Problem:
    detail = f"a batch may have at most {limit} {records} (DDPOBS_SERVER_{setting}), got {count}: raise the setting"
    return Problem(413, "Batch too large", detail)
