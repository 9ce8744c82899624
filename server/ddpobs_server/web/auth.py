"""Authentication and authorization of requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from ddpobs_server.web.authenticator import Caller
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import services_of

BEARER = HTTPBearer(
    scheme_name="token",
    description="A token that `ddpobs-server token create` printed. A collector on loopback without tokens needs none.",
    auto_error=False,
)
"""Only documents the scheme in OpenAPI; `Authenticator` does the checks."""
_REFRESHED = "ddpobs.tokens_refreshed"


async def refresh_tokens_for(request: Request) -> None:
    """Refresh the token cache for a request, once. This may wait: hold no slot or lock meanwhile.

    Raises:
        Problem: As `Authenticator.refresh_if_stale`.
    """
    if not request.scope.get(_REFRESHED, False):
        request.scope[_REFRESHED] = True
        await services_of(request).authenticator.refresh_if_stale(*_credentials(request))


def workspace_of(request: Request) -> str | None:
    """Workspace that a request's places count for; None if its token is missing or wrong. Refuses nothing."""
    with suppress(Problem):
        if (person := services_of(request).sign_on.caller(request.scope)) is not None:
            return person.workspace
    return services_of(request).authenticator.workspace(_credentials(request)[0])


def _credentials(request: Request) -> tuple[str, str]:
    """The `Authorization` header and the client's address."""
    return request.headers.get("Authorization", ""), request.client.host if request.client else "unknown"


def needs(scope: str, people: bool = True) -> Callable[[Request], Awaitable[Caller]]:
    """Create a dependency that returns the caller, or refuses it without a scope.

    Args:
        scope: One of `SCOPES`.
        people: Whether people whom a proxy signed on are served, not only tokens.
    """

    async def authorize(
        request: Request, _documented: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)] = None
    ) -> Caller:
        services = services_of(request)
        authenticator = services.authenticator
        await refresh_tokens_for(request)
        if authenticator.allows_anonymous:
            _check_host(request.headers.get("Host", ""), tuple(services.settings.hosts))
        person = services.sign_on.caller(request.scope) if people else None
        caller = person or authenticator.caller(*_credentials(request))
        if scope not in caller.scopes:
            scopes = ", ".join(sorted(caller.scopes))
            owner = caller.name[:64] if caller.is_person else "the token"
            raise Problem(403, "Not allowed", f"this request needs the scope {scope}, and {owner} has {scopes}")
        return caller

    return authorize


@lru_cache
def _check_host(host: str, own_hosts: tuple[str, ...]) -> None:
    """Without tokens, accept only host names that no web site can own.

    A web site could otherwise resolve its own name to this address and let a visitor's browser read the runs.

    Raises:
        Problem: 421 for any other name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if "." not in name or name.endswith((".localhost", ".internal")) or name in own_hosts or ip_address(name):
            return
    except ValueError:
        pass
    detail = (
        f"this collector has no token and does not respond under the name {host[:100]!r}; use its address, or create "
        "a token with `ddpobs-server token create`"
    )
    raise Problem(421, "Misdirected request", detail)
