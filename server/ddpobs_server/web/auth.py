"""Who may call: everyone on loopback where no token was ever made, else whoever holds one that may.

A token belongs to a workspace and sees the runs of that alone. A run of the default workspace is kept under its own
name, one of another workspace under `workspace/run`; outside of this file and the store nobody knows of that.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from ddpobs_server.settings import Settings
from ddpobs_server.store import DEFAULT_WORKSPACE, Store, Token
from ddpobs_server.web.problems import Problem

_log = logging.getLogger(__name__)
SCOPES = ("ingest", "read", "admin")
"""Sending batches; reading everything; deleting runs, and all that the others may."""
_KEY_LENGTH = 128
_KNOWN_S = 5.0
"""How long a token may still work after it was revoked."""
_NEW_S = 1.0
"""For a token that is not known the database is asked no more often."""
_OURS = re.compile(r"(?i:bearer) ddpobs_([0-9a-f]{8})_[A-Za-z0-9_-]{32}")
"""The header with a token of `new_token`'s making."""
_WRONG_TOKENS, _WITHIN_S = 20, 60.0
"""So many wrong tokens from one address within so long, and it has to wait."""
_ADDRESSES = 10_000


@dataclass(frozen=True)
class Caller:
    """Who calls: a workspace, and what may be done there."""

    workspace: str
    scopes: frozenset[str]

    def key(self, run: str) -> str:
        """What the store calls a run of this workspace.

        Raises:
            Problem: 422, where both names together are too long.
        """
        key = run if self.workspace == DEFAULT_WORKSPACE else f"{self.workspace}/{run}"
        if len(key) > _KEY_LENGTH:
            raise Problem(
                422, "Run id too long", f"at most {_KEY_LENGTH - len(self.workspace) - 1} characters in this workspace"
            )
        return key


EVERYTHING = Caller(DEFAULT_WORKSPACE, frozenset(SCOPES))
BEARER = HTTPBearer(
    scheme_name="token",
    description="As `ddpobs-server token create` prints it. A collector on loopback without tokens wants none.",
    auto_error=False,
)
"""For the OpenAPI document alone: who may call is for the `Authenticator` to say."""


def new_token(name: str, workspace: str, scopes: list[str]) -> tuple[str, Token]:
    """A token to give away, and what is kept of it: not the secret."""
    token_id, secret = secrets.token_hex(4), secrets.token_urlsafe(24)
    kept = Token(token_id, _digest(secret), name, workspace, tuple(scopes), time.time_ns(), None)
    return f"ddpobs_{token_id}_{secret}", kept


class Authenticator:
    """Knows the tokens, and the addresses that tried wrong ones.

    Args:
        settings: May hold a token that may do everything in the default workspace.
        store: Holds the others.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store
        self._lock = threading.Lock()
        self._tokens: dict[str, Token] | None = None
        self._read_at = float("-inf")
        self._looking = asyncio.Lock()
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def look(self) -> None:
        """Read the tokens. Where that fails, those known before go on working.

        Raises:
            Problem: 503, where none were ever read.
        """
        began = time.monotonic()
        try:
            self._tokens = {token.token_id: token for token in self._store.tokens()}
        except Exception as error:
            _log.warning("tokens cannot be read: %s: %s", type(error).__name__, error)
            if self._tokens is None:
                raise Problem(503, "Not ready", "the database does not answer", {"Retry-After": "1"}) from error
        self._read_at = began

    async def refresh_if_stale(self, authorization: str, address: str) -> None:
        """Look where the last time was long ago, or before this header came and its token is not known: it may be new.

        Where it was long ago one request looks, and the others go on with what is known meanwhile.

        Raises:
            Problem: As `look`; 429 where it would be waited for and too many wrong tokens came from there.
        """
        now = time.monotonic()
        if now - self._read_at > _KNOWN_S:
            if self._tokens is not None:
                self._read_at = now
            await run_in_threadpool(self.look)
        elif self._may_be_new(authorization):
            self._check_patience(address)
            async with self._looking:
                if self._read_at < now:  # Else one look answered all who waited for it.
                    await asyncio.sleep(self._read_at + _NEW_S - time.monotonic())
                    await run_in_threadpool(self.look)

    @property
    def allows_anonymous(self) -> bool:
        """Whether nobody needs a token: none was ever made. To revoke the last one opens nothing."""
        return self._settings.token is None and not self._tokens and self._settings.on_loopback

    def caller(self, authorization: str, address: str) -> Caller:
        """Who sends this `Authorization` header.

        Raises:
            Problem: 401 without a token that is known; 429 after too many of these.
        """
        if self.allows_anonymous:
            return EVERYTHING
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer":
            if (found := self._find(given)) is not None:
                return found
            # A token of our own making cannot be guessed, one that somebody chose can.
            self._check_patience(address)
            if self._is_settings_token(given):
                return EVERYTHING
            self._note_wrong(address)
            raise Problem(401, "Wrong token", "no such token, or it was revoked", {"WWW-Authenticate": "Bearer"})
        raise Problem(
            401,
            "Token needed",
            "this collector wants a token as `Authorization: Bearer …`; clients take it from DDPOBS_TOKEN",
            {"WWW-Authenticate": "Bearer"},
        )

    def _may_be_new(self, authorization: str) -> bool:
        found = _OURS.fullmatch(authorization)
        known = self._tokens or {}
        return found is not None and found[1] not in known and not self._is_settings_token(authorization.split()[1])

    def _is_settings_token(self, given: str) -> bool:
        wanted = self._settings.token
        return wanted is not None and hmac.compare_digest(_digest(given), _digest(wanted.get_secret_value()))

    def _find(self, given: str) -> Caller | None:
        prefix, _, rest = given.partition("_")
        token_id, _, secret = rest.partition("_")
        token = (self._tokens or {}).get(token_id) if prefix == "ddpobs" else None
        if token is None or token.revoked_ns is not None or not hmac.compare_digest(_digest(secret), token.digest):
            return None
        return Caller(token.workspace, frozenset(SCOPES if "admin" in token.scopes else token.scopes))

    def _check_patience(self, address: str) -> None:
        with self._lock:
            tries = self._wrong.get(address)
            if tries is None:
                return
            while tries and time.monotonic() - tries[0] > _WITHIN_S:
                tries.popleft()
            wait_s = _WITHIN_S - (time.monotonic() - tries[0]) if len(tries) >= _WRONG_TOKENS else 0.0
        if wait_s > 0:
            raise Problem(
                429,
                "Too many wrong tokens",
                f"{_WRONG_TOKENS} wrong tokens came from {address} within {_WITHIN_S:.0f} s",
                {"Retry-After": str(int(wait_s) + 1)},
            )

    def _note_wrong(self, address: str) -> None:
        with self._lock:
            self._wrong.setdefault(address, deque(maxlen=_WRONG_TOKENS)).append(time.monotonic())
            self._wrong.move_to_end(address)
            while len(self._wrong) > _ADDRESSES:
                self._wrong.popitem(last=False)


async def refresh_tokens_for(request: Request) -> None:
    """Have the authenticator look again for a request, once: it may wait, and nothing should be held meanwhile.

    Raises:
        Problem: As `Authenticator.poll_flags`.
    """
    if not getattr(request.state, "looked", False):
        request.state.looked = True
        await request.app.state.authenticator.refresh_if_stale(*_whose(request))


def _whose(request: Request) -> tuple[str, str]:
    """The `Authorization` header and the client's address."""
    return request.headers.get("Authorization", ""), request.client.host if request.client else "unknown"


def needs(scope: str) -> Callable[[Request], Awaitable[Caller]]:
    """A dependency: the caller, if it may do that.

    Args:
        scope: One of `SCOPES`.
    """

    async def allowed(
        request: Request, _documented: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)] = None
    ) -> Caller:
        authenticator: Authenticator = request.app.state.authenticator
        await refresh_tokens_for(request)
        if authenticator.allows_anonymous:
            _check_host(request.headers.get("Host", ""), request.app.state.settings.host)
        caller = authenticator.caller(*_whose(request))
        if scope not in caller.scopes:
            raise Problem(
                403, "Not allowed", f"this token may {', '.join(sorted(caller.scopes))}, and this needs {scope}"
            )
        return caller

    return allowed


@lru_cache
def _check_host(host: str, own: str) -> None:
    """Without tokens, take only names that no web site can have: by one of its own it might lead a browser here.

    Raises:
        Problem: 421, for any other name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if "." not in name or name.endswith((".localhost", ".internal")) or name == own or ip_address(name):
            return
    except ValueError:
        pass
    detail = f"this collector has no token and does not answer to {host[:100]!r}; use its address, or make a token"
    raise Problem(421, "Another's name", detail)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
