"""Read a request's body within its limits of size and time."""

from __future__ import annotations

import asyncio

import zstandard
from fastapi import Request
from starlette.requests import ClientDisconnect

from ddpobs_server.ingest.memory_budget import Reservation
from ddpobs_server.settings import Settings
from ddpobs_server.web.problems import Problem

_MAX_DIGITS = 20
"""Longest `Content-Length` that is parsed. Leading zeros are allowed without limit, and `int` refuses long texts."""

PACE_S = 10.0
"""Seconds over which a body's pace is measured, and after which an unfinished body without a further byte ends."""


async def read_body(request: Request, reservation: Reservation, settings: Settings) -> bytes:
    """Return the request's body as it was sent.

    Raises:
        Problem: 413 if it is too large, 408 if it arrives too slowly, 400 if it ends early, 503 from `reservation`.
    """
    limit = int(settings.max_body_mb * 1e6)
    try:
        async with asyncio.timeout(min(PACE_S, settings.upload_timeout_s)) as timer:
            pace = Pace(timer, settings.upload_timeout_s, settings.min_pace_kb_s)
            return await _read(request, reservation, limit, pace)
    except TimeoutError:
        raise Problem(
            408,
            "Upload too slow",
            f"the body did not arrive within {settings.upload_timeout_s:g} s (DDPOBS_SERVER_UPLOAD_TIMEOUT_S), or less "
            f"than {settings.min_pace_kb_s:g} kB/s of it (DDPOBS_SERVER_MIN_PACE_KB_S)",
            {"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise Problem(400, "Body cut short", "the connection was closed before the end of the body") from None


class Pace:
    """Extends a body's time while it arrives at the least pace, up to the longest time for a whole body.

    Args:
        timer: Ends the body.
        longest_s: Longest time for the whole body.
        min_pace_kb_s: Least pace.
    """

    def __init__(self, timer: asyncio.Timeout, longest_s: float, min_pace_kb_s: float) -> None:
        self._timer, self._loop = timer, asyncio.get_running_loop()
        self._last_s = self._loop.time() + longest_s
        self._least_bytes = self._missing_bytes = int(PACE_S * min_pace_kb_s * 1e3)

    def count(self, size_bytes: int) -> None:
        """Count a part of the body."""
        self._missing_bytes -= size_bytes
        if self._missing_bytes <= 0:
            self._missing_bytes = self._least_bytes
            self._timer.reschedule(min(self._loop.time() + PACE_S, self._last_s))


async def _read(request: Request, reservation: Reservation, limit: int, pace: Pace) -> bytes:
    announced = request.headers.get("Content-Length", "")
    chunks: list[bytes] = []
    size = int(announced) if announced.isdecimal() and len(announced) <= _MAX_DIGITS else 0
    if size <= limit:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                break
            reservation.add(len(chunk))
            pace.count(len(chunk))
            chunks.append(chunk)
        else:
            return b"".join(chunks)
    raise Problem(413, "Body too large", f"a body may have at most {limit} bytes (DDPOBS_SERVER_MAX_BODY_MB)")


def plain_bytes(body: bytes, encoding: str, limit: int) -> int:
    """Size of a body after decompression; `limit` if the body does not state it.

    Raises:
        Problem: 413 if the size exceeds `limit`; 422 if the body is not zstd.
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
    """The problem for a batch of more than `limit` bytes."""
    detail = f"a batch may have at most {limit} bytes after decompression (DDPOBS_SERVER_MAX_BATCH_MB)"
    return Problem(413, "Batch too large", detail)
