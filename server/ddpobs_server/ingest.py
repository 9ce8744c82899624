"""A batch in, an acknowledgement out after commit: one writer thread, many batches a transaction."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import zstandard
from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ddpobs import wire
from ddpobs.errors import WireError
from ddpobs_server import limits
from ddpobs_server.auth import needs
from ddpobs_server.problems import Problem
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Outcome, Store, UnavailableError, Unstorable

_log = logging.getLogger(__name__)
_GROUP = 64
"""Most batches in one transaction."""
_CLOSE_S = 10
_SMALL_BYTES, _LARGE_BYTES = 128_000, 1_000_000
_WINDOW_BYTES = 2**24
"""Most memory that zstd's own window may take."""
_RETRIED = (408, 429, 503)
_may_ingest = needs("ingest")
_AGES_S = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 86_400.0)


class _Direct(APIRoute):
    """A route whose function takes the request as it is; FastAPI's way to it takes half as long as decoding a batch."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function itself."""
        return self.endpoint


router = APIRouter(prefix="/api/v1", tags=["ingest"], route_class=_Direct)
_KEY: dict[str, dict[str, Any]] = {
    "run": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
    "source": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
    "seq": {"type": "integer", "minimum": 0, "maximum": 2**48},
}
"""The path's parameters."""


class Writer:
    """The one thread that writes. Requests wait for their batch's commit, not for a transaction of their own.

    Args:
        store: Where batches go.
        limit: Batches that may wait; more are refused with a retryable answer.
        registry: Takes the writer's metrics.
    """

    def __init__(self, store: Store, limit: int, registry: CollectorRegistry) -> None:
        self._store = store
        self._waiting: queue.Queue[tuple[Arrival, Future[Outcome]] | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._run, name="ddpobs-writer", daemon=True)
        self.batches = Counter("ddpobs_server_batches", "Batches by outcome.", ["outcome"], registry=registry)
        self.spans = Counter("ddpobs_server_spans", "Bucket spans stored.", registry=registry)
        self.bytes = Counter("ddpobs_server_ingest_bytes", "Bytes of batch bodies taken in.", registry=registry)
        self.seconds = Histogram(
            "ddpobs_server_ingest_seconds", "From a batch's arrival to its commit.", registry=registry
        )
        self.commit_seconds = Histogram(
            "ddpobs_server_commit_seconds", "One transaction of up to 64 batches.", registry=registry
        )
        self.age_seconds = Histogram(
            "ddpobs_server_batch_age_seconds",
            "From a batch's making, by its rank's clock, to its arrival: long where ranks had to wait or to spool.",
            buckets=_AGES_S,
            registry=registry,
        )
        self._began: float | None = None
        for name, text, value in (
            ("queue_depth", "Batches waiting for the writer.", self._waiting.qsize),
            ("queue_limit", "Batches that may wait for the writer.", lambda: limit),
            ("writer_alive", "1 while the thread that writes lives.", self._thread.is_alive),
            ("writer_busy_seconds", "How long the transaction under way has taken.", self._busy_s),
        ):
            Gauge(f"ddpobs_server_{name}", text, registry=registry).set_function(value)
        for outcome in ("stored", "repeated", "conflict", "refused", "busy", "failed"):
            self.batches.labels(outcome)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Write what waits, then end the thread. What a database does not take in time was not acknowledged."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def submit(self, arrival: Arrival) -> Future[Outcome]:
        """Queue a batch; the future is done after its commit.

        Raises:
            Problem: 503, where too many wait already.
        """
        future: Future[Outcome] = Future()
        try:
            self._waiting.put_nowait((arrival, future))
        except queue.Full:
            raise Problem(
                503, "Busy", f"{self._waiting.maxsize} batches wait to be written; try again", {"Retry-After": "1"}
            ) from None
        return future

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            group = [first]
            while len(group) < _GROUP and not self._waiting.empty():
                item = self._waiting.get()
                if item is None:
                    self._waiting.put(None)
                    break
                group.append(item)
            self._write(group)

    def _write(self, group: list[tuple[Arrival, Future[Outcome]]]) -> None:
        self._began = time.monotonic()
        try:
            with self.commit_seconds.time():
                outcomes = self._store.ingest([arrival for arrival, _ in group])
        except UnavailableError as error:
            _log.warning("%d batches were not written, their clients are told to try again: %s", len(group), error)
            self._fail(group, error)
            return
        except Exception as error:
            if len(group) > 1:
                # One bad batch must not take the others' transaction with it.
                for item in group:
                    self._write([item])
                return
            run, source, seq = group[0][0].key
            _log.exception("a batch was not written", extra={"run": run, "source": source, "seq": seq})
            self._fail(group, error)
            return
        finally:
            self._began = None
        for (arrival, future), outcome in zip(group, outcomes, strict=True):
            self._count(arrival, outcome)
            # Whoever asked may have gone meanwhile; the batch is stored all the same.
            if future.set_running_or_notify_cancel():
                future.set_result(outcome)

    def _busy_s(self) -> float:
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _fail(self, group: list[tuple[Arrival, Future[Outcome]]], error: Exception) -> None:
        for _, future in group:
            self.batches.labels("failed").inc()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _count(self, arrival: Arrival, outcome: Outcome) -> None:
        self.batches.labels(outcome.value).inc()
        self.seconds.observe(max(0.0, (time.time_ns() - arrival.received_ns) / 1e9))
        self.age_seconds.observe(max(0.0, (arrival.received_ns - arrival.batch.anchor.wall_ns) / 1e9))
        if outcome is Outcome.STORED:
            self.bytes.inc(arrival.size_bytes)
            self.spans.inc(0 if arrival.batch.spans is None else len(arrival.batch.spans.step))


@router.put(
    "/runs/{run}/sources/{source}/batches/{seq}",
    status_code=201,
    responses={200: {"description": "Stored before."}, 409: {"description": "Another batch has this key."}},
    openapi_extra={
        "parameters": [{"name": name, "in": "path", "required": True, "schema": _KEY[name]} for name in _KEY],
        "requestBody": {
            "required": True,
            "content": {wire.MSGPACK: {"schema": {"type": "string", "format": "binary"}}, wire.JSON: {}},
        },
    },
)
async def put_batch(request: Request) -> Response:
    """Take one batch; the acknowledgement comes after commit. The same body under the same key is stored once."""
    received_ns = time.time_ns()
    caller = await _may_ingest(request)
    state = request.app.state
    try:
        with state.under_way.hold() as held:
            body = await limits.read_body(request, held, state.settings)
            batch = await _batch(request, body, held)
            _check_key(batch, request.path_params)
            key = caller.key(batch.run)
            await state.admission.check(caller.workspace, key, batch.source)
            if key != batch.run:
                batch = msgspec.structs.replace(batch, run=key)
            arrival = Arrival(batch, hashlib.sha256(body).digest(), len(body), received_ns)
            outcome = await asyncio.wrap_future(state.writer.submit(arrival))
    except Problem as problem:
        state.writer.batches.labels("busy" if problem.status in _RETRIED else "refused").inc()
        raise
    except Unstorable as error:
        raise Problem(422, "Malformed batch", f"a value is beyond what the database holds: {error}") from None
    if outcome is Outcome.CONFLICT:
        raise Problem(409, "Conflict", f"another batch is stored under source {batch.source}, seq {batch.seq}")
    repeated = outcome is Outcome.REPEATED
    answer = wire.Acknowledgement(source=batch.source, seq=batch.seq, repeated=repeated)
    return Response(wire.pack_json(answer), 200 if repeated else 201, media_type=wire.JSON)


def _check_key(batch: wire.Batch, path: dict[str, str]) -> None:
    for field in _KEY:
        expected, came = path[field], str(getattr(batch, field))
        if came != expected:
            detail = f"{field}: expected {expected[:200]!r}, as in the path, got {came!r}"
            raise Problem(422, "Key mismatch", detail, field=field, expected=expected[:200], came=came)


async def _batch(request: Request, body: bytes, held: limits.Held) -> wire.Batch:
    """The batch. A thread costs more than to decode what a rank sends; what is large would hold up everyone else.

    The largest are decoded one at a time: rubbish may take much memory until it is known.
    """
    state = request.app.state
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type not in (wire.MSGPACK, wire.JSON):
        detail = f"expected {wire.MSGPACK} or {wire.JSON}, got {content_type[:100]!r}"
        raise Problem(415, "Unknown content type", detail)
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    plain_bytes = limits.plain_bytes(body, encoding, int(state.settings.max_batch_mb * 1e6))
    held.add(limits.memory_bytes(plain_bytes))
    form = (content_type, encoding == "zstd", state.settings)
    if plain_bytes <= _SMALL_BYTES:
        return _decode(body, *form)
    limiter = state.large_batches if plain_bytes > _LARGE_BYTES else None
    return await to_thread.run_sync(_decode, body, *form, limiter=limiter)


def _decode(body: bytes, content_type: str, compressed: bool, settings: Settings) -> wire.Batch:
    limit = int(settings.max_batch_mb * 1e6)
    try:
        batch = wire.decode(_decompressed(body, limit) if compressed else body, content_type, limit)
    except WireError as error:
        raise Problem(
            422, "Malformed batch", str(error), field=error.field, expected=error.expected, came=str(error.came)
        ) from None
    limits.check_batch(batch, settings)
    if batch.spans is not None and batch.packed_spans is None:
        batch = msgspec.structs.replace(batch, packed_spans=wire.pack_spans(batch.spans))
    return batch


def _decompressed(body: bytes, limit: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    try:
        if zstandard.frame_content_size(body) >= 0:  # It is checked to be below the limit.
            return decompressor.decompress(body, allow_extra_data=False)
        with decompressor.stream_reader(body) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise Problem(422, "Malformed batch", f"$: expected zstd, got {error}", field="$") from None
    if len(plain) > limit:
        raise limits.batch_too_large(limit)
    return plain
