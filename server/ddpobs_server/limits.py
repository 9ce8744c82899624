"""How much a client may send, and how much may be under way at once. The settings say how much; see `Settings`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import zstandard
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry, Gauge
from starlette.requests import ClientDisconnect

from ddpobs import wire
from ddpobs_server.problems import Problem
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store

_IN_MEMORY = 10
"""Most that a batch takes in memory, against its bytes before decoding."""
_REMEMBERED = 100_000
_FACTS, _FACTS_LENGTH = 100, 16_384
"""Entries of a mapping that a client fills, and its characters: each source's is read with all others' of its run."""
_COUNTED_S = 5.0
"""How long a count of a run's sources is gone by."""
_DIGITS = 20
"""Most of a length that is read. Any number of zeros may stand before it, and `int` refuses what is too long."""
_LATER = {"Retry-After": "60"}


class Held:
    """What one request takes of `UnderWay`."""

    def __init__(self, shared: UnderWay) -> None:
        self._shared, self.bytes = shared, 0

    def add(self, size_bytes: int) -> None:
        """Take more.

        Raises:
            Problem: 503, where others hold too much already; whoever is alone may go on.
        """
        others = self._shared.bytes - self.bytes
        if others and self._shared.bytes + size_bytes > self._shared.limit_bytes:
            raise Problem(
                503,
                "Busy",
                f"batches under way take {self._shared.limit_bytes} bytes (DDPOBS_SERVER_MAX_UNDER_WAY_MB); try again",
                {"Retry-After": "1"},
            )
        self.bytes += size_bytes
        self._shared.bytes += size_bytes


class UnderWay:
    """Memory of batches from their first byte to their commit. Belongs to the event loop's thread.

    Args:
        limit_bytes: Most that all of them may take.
        registry: Takes the metric.
    """

    def __init__(self, limit_bytes: int, registry: CollectorRegistry) -> None:
        self.limit_bytes, self.bytes = limit_bytes, 0
        gauge = Gauge("ddpobs_server_under_way_bytes", "Memory of batches from arrival to commit.", registry=registry)
        gauge.set_function(lambda: self.bytes)

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """What is added is given back at the end of the block."""
        held = Held(self)
        try:
            yield held
        finally:
            self.bytes -= held.bytes


class Admission:
    """Lets new runs and new sources in until there are too many; those that are known always may send.

    Those that arrive before the first of them is stored are all let in, and several collectors on one database count
    for themselves: there may be a few more.

    Args:
        settings: `max_runs` and `max_sources`.
        store: Knows who is there.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store
        self._known: dict[tuple[str, str], None] = {}
        self._left: dict[str, tuple[int, float]] = {}
        """Of runs that are stored, how many sources more each may have, and until when that holds."""
        self._counting = asyncio.Lock()

    async def check(self, workspace: str, run: str, source: str) -> None:
        """Return where the source may send; `remember` it once it has.

        Raises:
            Problem: 429, where the workspace has too many runs or the run too many sources.
        """
        if self._let_in(run, source):
            return
        async with self._counting:  # All ranks of a job begin at once: what one has found holds for the others.
            if not self._let_in(run, source):
                await run_in_threadpool(self._count, workspace, run, source)

    def remember(self, run: str, source: str) -> None:
        """A batch of the source is stored."""
        self._known[run, source] = None
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _let_in(self, run: str, source: str) -> bool:
        if (run, source) in self._known:
            return True
        left, until = self._left.pop(run, (0, 0.0))
        if left == 0 or time.monotonic() > until:
            return False
        self._left[run] = left - 1, until
        return True

    def _count(self, workspace: str, run: str, source: str) -> None:
        sources, known = self._store.sources_there(run, source)
        if sources:
            self._left[run] = max(0, self._settings.max_sources - sources - 1), time.monotonic() + _COUNTED_S
            if len(self._left) > _REMEMBERED:
                del self._left[next(iter(self._left))]
        if known:
            return
        if sources >= self._settings.max_sources:
            raise Problem(
                429,
                "Too many sources",
                f"the run has {sources} sources (DDPOBS_SERVER_MAX_SOURCES); start another run",
                _LATER,
            )
        if sources == 0 and (runs := self._store.runs_there(workspace)) >= self._settings.max_runs:
            raise Problem(
                429,
                "Too many runs",
                f"workspace {workspace} has {runs} runs (DDPOBS_SERVER_MAX_RUNS); delete some, or have them expire",
                _LATER,
            )


async def read_body(request: Request, held: Held, settings: Settings) -> bytes:
    """The body, as it comes.

    Raises:
        Problem: 413 where it is too large, 408 where it takes too long, 400 where it ends early, 503 from `held`.
    """
    limit = int(settings.max_body_mb * 1e6)
    try:
        async with asyncio.timeout(settings.upload_timeout_s):
            return await _read(request, held, limit)
    except TimeoutError:
        raise Problem(
            408,
            "Upload too slow",
            f"the body did not come within {settings.upload_timeout_s:g} s (DDPOBS_SERVER_UPLOAD_TIMEOUT_S)",
            {"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise Problem(400, "Body cut short", "the connection was closed before the body's end") from None


async def _read(request: Request, held: Held, limit: int) -> bytes:
    told = request.headers.get("Content-Length", "")
    parts: list[bytes] = []
    size = int(told) if told.isdecimal() and len(told) <= _DIGITS else 0
    if size <= limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            held.add(len(part))
            parts.append(part)
        else:
            return b"".join(parts)
    raise Problem(413, "Body too large", f"at most {limit} bytes are taken (DDPOBS_SERVER_MAX_BODY_MB)")


def plain_bytes(body: bytes, encoding: str, limit: int) -> int:
    """How many bytes a body will be when decompressed; the limit, where it does not tell.

    Raises:
        Problem: 413, where these are too many; 422, where it is no zstd.
    """
    size = len(body)
    if encoding:
        try:
            size = zstandard.frame_content_size(body)
        except zstandard.ZstdError as error:
            raise Problem(422, "Malformed batch", f"$: expected zstd, got {error}", field="$") from None
    if size > limit:
        raise batch_too_large(limit)
    return size if size >= 0 else limit


def batch_too_large(limit: int) -> Problem:
    """The answer to a batch of more than `limit` bytes."""
    detail = f"at most {limit} bytes when decompressed (DDPOBS_SERVER_MAX_BATCH_MB)"
    return Problem(413, "Batch too large", detail)


def memory_bytes(plain: int) -> int:
    """What a batch may take in memory once it is decoded."""
    return plain * _IN_MEMORY


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
