"""Who may call: everyone on loopback where there is no token, else whoever holds it."""

from __future__ import annotations

import hmac

from fastapi import Request

from ddpobs_server.problems import Problem


def require_token(request: Request) -> None:
    """Refuse a call without the collector's token.

    Raises:
        Problem: 401, where the token is missing or another.
    """
    token = request.app.state.settings.token
    if token is None:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), token.get_secret_value().encode()):
        raise Problem(
            401,
            "Token needed",
            "this collector wants its token as `Authorization: Bearer …`; clients take it from DDPOBS_TOKEN",
            {"WWW-Authenticate": "Bearer"},
        )
