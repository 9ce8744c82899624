"""A batch in, an acknowledgement out after commit: one writer thread, many batches a transaction."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Annotated

import msgspec
import zstandard
from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ddpobs import wire
from ddpobs.errors import WireError
from ddpobs_server.auth import Caller, needs
from ddpobs_server.problems import Problem
from ddpobs_server.store import Arrival, Outcome, Store, UnavailableError

_log = logging.getLogger(__name__)
_GROUP = 64
"""Most batches in one transaction."""
_CLOSE_S = 10
_SMALL_BYTES = 64 * 1024

router = APIRouter(prefix="/api/v1", tags=["ingest"])

RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
SourceId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")]
Seq = Annotated[int, Path(ge=0, le=2**62)]


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
        depth = Gauge("ddpobs_server_queue_depth", "Batches waiting for the writer.", registry=registry)
        depth.set_function(self._waiting.qsize)
        for outcome in ("stored", "repeated", "conflict", "refused", "failed"):
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
        try:
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
            _log.exception("a batch of run %s was not written", group[0][0].batch.run)
            self._fail(group, error)
            return
        for (arrival, future), outcome in zip(group, outcomes, strict=True):
            self._count(arrival, outcome)
            # Whoever asked may have gone meanwhile; the batch is stored all the same.
            if future.set_running_or_notify_cancel():
                future.set_result(outcome)

    def _fail(self, group: list[tuple[Arrival, Future[Outcome]]], error: Exception) -> None:
        for _, future in group:
            self.batches.labels("failed").inc()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _count(self, arrival: Arrival, outcome: Outcome) -> None:
        self.batches.labels(outcome.value).inc()
        self.seconds.observe(max(0.0, (time.time_ns() - arrival.received_ns) / 1e9))
        if outcome is Outcome.STORED:
            self.bytes.inc(arrival.size_bytes)
            self.spans.inc(0 if arrival.batch.spans is None else len(arrival.batch.spans.step))


@router.put(
    "/runs/{run}/sources/{source}/batches/{seq}",
    status_code=201,
    responses={200: {"description": "Stored before."}, 409: {"description": "Another batch has this key."}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {wire.MSGPACK: {"schema": {"type": "string", "format": "binary"}}, wire.JSON: {}},
        }
    },
)
async def put_batch(
    run: RunId, source: SourceId, seq: Seq, request: Request, caller: Annotated[Caller, Depends(needs("ingest"))]
) -> Response:
    """Take one batch; the acknowledgement comes after commit. The same body under the same key is stored once."""
    received_ns = time.time_ns()
    state = request.app.state
    try:
        body = await _body(request, int(state.settings.max_body_mb * 1e6))
        limit = int(state.settings.max_batch_mb * 1e6)
        # A thread costs more than to decode what a rank sends; what is large would hold up everyone else.
        small = len(body) <= _SMALL_BYTES
        batch = _decode(request, body, limit) if small else await run_in_threadpool(_decode, request, body, limit)
        _check_key(batch, {"run": run, "source": source, "seq": seq})
    except Problem:
        state.writer.batches.labels("refused").inc()
        raise
    if (key := caller.key(run)) != run:
        batch = msgspec.structs.replace(batch, run=key)
    digest = hashlib.sha256(body).digest()
    outcome = await asyncio.wrap_future(state.writer.submit(Arrival(batch, digest, len(body), received_ns)))
    if outcome is Outcome.CONFLICT:
        raise Problem(409, "Conflict", f"another batch is stored under source {source}, seq {seq}")
    repeated = outcome is Outcome.REPEATED
    answer = wire.Acknowledgement(source=source, seq=seq, repeated=repeated)
    return Response(wire.pack_json(answer), 200 if repeated else 201, media_type=wire.JSON)


def _check_key(batch: wire.Batch, path: dict[str, str | int]) -> None:
    for field, expected in path.items():
        came = getattr(batch, field)
        if came != expected:
            detail = f"{field}: expected {expected}, as in the path, got {came}"
            raise Problem(422, "Key mismatch", detail, field=field, expected=str(expected), came=str(came))


async def _body(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Problem(413, "Body too large", f"at most {limit} bytes are taken (DDPOBS_SERVER_MAX_BODY_MB)")
        parts.append(part)
    return b"".join(parts)


def _decode(request: Request, body: bytes, limit: int) -> wire.Batch:
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type not in (wire.MSGPACK, wire.JSON):
        raise Problem(415, "Unknown content type", f"expected {wire.MSGPACK} or {wire.JSON}, got {content_type!r}")
    plain = _decompress(body, request.headers.get("Content-Encoding", "identity").strip().lower(), limit)
    try:
        batch = wire.decode(plain, content_type, limit)
    except WireError as error:
        raise Problem(
            422, "Malformed batch", str(error), field=error.field, expected=error.expected, came=str(error.came)
        ) from None
    if batch.spans is not None and batch.packed_spans is None:
        batch = msgspec.structs.replace(batch, packed_spans=wire.pack_spans(batch.spans))
    return batch


def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise Problem(415, "Unknown content encoding", f"expected zstd or identity, got {encoding!r}")
    decompressor = zstandard.ZstdDecompressor()
    try:
        size = zstandard.frame_content_size(body)
        if 0 <= size <= limit:
            plain = decompressor.decompress(body, allow_extra_data=False)
        else:
            with decompressor.stream_reader(body) as reader:
                plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise Problem(422, "Malformed batch", f"$: expected zstd, got {error}", field="$") from None
    if len(plain) > limit:
        raise Problem(413, "Batch too large", f"at most {limit} bytes when decompressed (DDPOBS_SERVER_MAX_BATCH_MB)")
    return plain
