"""People who signed on at a proxy, which names them in a header, as Grafana's `[auth.proxy]`.

The headers are read only from the proxy's own connections: from any other peer they are ignored.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ddpobs_server.settings import Settings
from ddpobs_server.web.authenticator import SCOPES, Caller
from ddpobs_server.web.problems import Problem

_SCOPES = {"read": {"read"}, "label": {"read", "ingest"}, "admin": set(SCOPES)}
"""Scopes by access in the settings. A route that takes batches refuses people, whatever their scopes."""
_PEER = "ddpobs.peer"


class KeepPeer:
    """Middleware that keeps the connection's own address, which a trusted `X-Forwarded-For` then replaces."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        if scope["type"] == "http":
            scope[_PEER] = scope["client"][0] if scope["client"] else ""
        await self._app(scope, receive, send)


class SignOn:
    """Recognizes people by the proxy's headers.

    Args:
        settings: Names the proxy, its headers, and what each group may do.
    """

    def __init__(self, settings: Settings) -> None:
        self._proxies = [ip_network(proxy) for proxy in settings.listed_sign_on_proxies]
        self._user_header, self._groups_header = settings.sign_on_user_header, settings.sign_on_groups_header
        self._access = settings.sign_on_access

    @property
    def is_on(self) -> bool:
        """Whether the settings name a proxy."""
        return bool(self._proxies)

    def caller(self, scope: Scope) -> Caller | None:
        """The person that a request is from; None if it is not from the proxy, has a token, or names nobody.

        Raises:
            Problem: 401 if a header comes twice; 403 if no group of the person has access.
        """
        if not self.is_on or not self._is_proxy(scope.get(_PEER, "")):
            return None
        headers = Headers(scope=scope)
        if headers.get("Authorization", "").lower().startswith("bearer "):
            return None
        user, groups = (self._only(headers, name) for name in (self._user_header, self._groups_header))
        if not user:
            return None
        names = {"*", *map(str.strip, groups.split(","))}
        for group, workspace, access in self._access:
            if group in names:
                return Caller(workspace, frozenset(_SCOPES[access]), user, "person")
        detail = f"no group of {user[:64]} has access to this collector; DDPOBS_SERVER_SIGN_ON_GROUPS gives it"
        raise Problem(403, "Not allowed", detail)

    def _is_proxy(self, peer: str) -> bool:
        try:
            address = ip_address(peer)
        except ValueError:
            return False
        return any(address in proxy for proxy in self._proxies)

    @staticmethod
    def _only(headers: Headers, name: str) -> str:
        values = headers.getlist(name)
        if len(values) > 1:  # The proxy added its header to one of the client's.
            detail = f"the header {name} came {len(values)} times: let the proxy replace it, not add it"
            raise Problem(401, "Ambiguous sign-on", detail)
        return values[0].strip() if values else ""
