"""Bodies of requests that change something small."""

from __future__ import annotations

import asyncio

from fastapi import Request

from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import Services

_MAX_S = 10.0
"""Longest time until a body has arrived."""


async def small_body(request: Request, services: Services, workspace: str, max_bytes: int) -> bytes:
    """Return the request's body when the workspace may send, and count it against the workspace's rates.

    Raises:
        Problem: 413 if it is too large, 408 if it arrives too slowly, 429 if the workspace sends too much.
    """
    await services.rates.wait_to_send(workspace)
    body = bytearray()
    try:
        async with asyncio.timeout(_MAX_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise Problem(413, "Body too large", f"a body may have at most {max_bytes} bytes")
    except TimeoutError:
        raise Problem(408, "Upload too slow", f"the body did not arrive within {_MAX_S:g} s") from None
    services.rates.count_bytes(workspace, len(body))
    return bytes(body)
