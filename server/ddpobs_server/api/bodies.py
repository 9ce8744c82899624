"""Bodies of requests that change something small."""

from __future__ import annotations

import asyncio

from fastapi import Request

from ddpobs_server.web.problems import Problem

_MAX_S = 10.0
"""Longest time until a body has arrived."""


async def small_body(request: Request, max_bytes: int) -> bytes:
    """Return the request's body.

    Raises:
        Problem: 413 if it is too large, 408 if it arrives too slowly.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_MAX_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise Problem(413, "Body too large", f"a body may have at most {max_bytes} bytes")
    except TimeoutError:
        raise Problem(408, "Upload too slow", f"the body did not arrive within {_MAX_S:g} s") from None
    return bytes(body)
