"""Read a request's body within its limits of size and time."""

from __future__ import annotations

import asyncio

import zstandard
from fastapi import Request
from starlette.requests import ClientDisconnect

from ddpobs_server.ingest.memory_budget import Reservation
from ddpobs_server.settings import Settings
from ddpobs_server.web.problems import Problem

_DIGITS = 20
"""Most of a length that is read. Any number of zeros may stand before it, and `int` refuses what is too long."""


async def read_body(request: Request, held: Reservation, settings: Settings) -> bytes:
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


async def _read(request: Request, held: Reservation, limit: int) -> bytes:
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
