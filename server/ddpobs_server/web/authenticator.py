"""Tokens: anonymous on loopback until the first token is created, otherwise by token.

A token belongs to a workspace and grants access to that workspace's runs only. The store's key of a run is the run's
name in the default workspace, and `workspace/run` in another one. Only this file and the store use that key.
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
from collections import OrderedDict
from dataclasses import dataclass

from fastapi.concurrency import run_in_threadpool

from ddpobs_server.settings import Settings
from ddpobs_server.store import DEFAULT_WORKSPACE, CallerKind, Store, Token
from ddpobs_server.web.problems import Problem

_log = logging.getLogger(__name__)
SCOPES = ("ingest", "read", "admin")
"""`ingest` sends batches; `read` reads everything; `admin` deletes runs and includes the other two."""
_KEY_LENGTH = 128
_CACHE_S = 5.0
"""Age at which cached tokens are refreshed; a revoked token works for at most this long."""
_REFRESH_S = 1.0
"""Shortest interval between two refreshes for unknown tokens."""
_GENERATED = re.compile(r"(?i:bearer) ddpobs_([0-9a-f]{8})_[A-Za-z0-9_-]{32}")
"""An `Authorization` header with a token that `new_token` may have generated."""
MAX_FAILURES, _FAILURES_S = 20, 60.0
"""Different wrong tokens from one address, and the period in seconds, after which the address has to wait."""
_MAX_ADDRESSES = 10_000


@dataclass(frozen=True)
class Caller:
    """Who a request is from, with the workspace and the scopes."""

    workspace: str
    scopes: frozenset[str]
    name: str = ""
    """Owner of the token, or the person."""
    kind: CallerKind = "anonymous"
    token_id: str = ""

    @property
    def is_person(self) -> bool:
        """Whether a proxy signed the caller on; a person sends no batches."""
        return self.kind == "person"

    def key(self, run: str) -> str:
        """Key in the store of a run of this workspace.

        Raises:
            Problem: 422 if both names together are too long.
        """
        key = run if self.workspace == DEFAULT_WORKSPACE else f"{self.workspace}/{run}"
        if len(key) > _KEY_LENGTH:
            raise Problem(
                422, "Run id too long", f"at most {_KEY_LENGTH - len(self.workspace) - 1} characters in this workspace"
            )
        return key


_ANONYMOUS = Caller(DEFAULT_WORKSPACE, frozenset(SCOPES))
_SETTINGS_TOKEN = Caller(DEFAULT_WORKSPACE, frozenset(SCOPES), kind="settings-token")


def new_token(name: str, workspace: str, scopes: list[str], expires_ns: int | None = None) -> tuple[str, Token]:
    """Generate a token to hand out, and the record to store, which contains only the secret's digest."""
    token_id, secret = secrets.token_hex(4), secrets.token_urlsafe(24)
    record = Token(token_id, _digest(secret), name, workspace, tuple(scopes), time.time_ns(), expires_ns)
    return f"ddpobs_{token_id}_{secret}", record


class Authenticator:
    """Caches the tokens, and delays addresses that sent many wrong ones.

    Args:
        settings: May contain tokens with all scopes in the default workspace.
        store: Holds the other tokens.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store
        self._lock = threading.Lock()
        self._tokens: dict[str, Token] | None = None
        self._refreshed_at = float("-inf")
        self._refresh_lock = asyncio.Lock()
        self._failures: OrderedDict[str, OrderedDict[bytes, float]] = OrderedDict()
        """By address: the digests of its wrong tokens, each with the time of its first arrival."""
        self._own_digests = self._digests_of_settings()
        self._file_digests = list(map(_digest, settings.file_tokens()))

    def refresh(self) -> None:
        """Read the tokens and the tokens' file. If that fails, the cached ones stay in use.

        Raises:
            Problem: 503 if the tokens were never read.
        """
        began = time.monotonic()
        self._refresh_file()
        try:
            self._tokens = {token.token_id: token for token in self._store.tokens()}
        except Exception as error:
            _log.warning("tokens cannot be read: %s: %s", type(error).__name__, error)
            if self._tokens is None:
                raise Problem(503, "Not ready", "the database does not respond", {"Retry-After": "1"}) from error
        self._refreshed_at = began

    def reload(self) -> None:
        """Follow the settings, which have changed, and refresh.

        Raises:
            Problem: As `refresh`.
        """
        self._own_digests = self._digests_of_settings()
        self.refresh()

    def _digests_of_settings(self) -> list[bytes]:
        token = self._settings.token
        return [] if token is None else [_digest(token.get_secret_value())]

    def _refresh_file(self) -> None:
        """Read the tokens' file, which an operator may replace. Without a valid token in it, the former ones stay."""
        try:
            tokens = self._settings.file_tokens()
        except ValueError as error:
            _log.warning("%s; the tokens that it held before stay valid until the file is correct", error)
            return
        if tokens:
            self._file_digests = list(map(_digest, tokens))

    async def refresh_if_stale(self, authorization: str, address: str) -> None:
        """Refresh the token cache if it is older than 5 s, or if this header carries a well-formed unknown token.

        An unknown token may be new. For a stale cache one request refreshes; the others use the cached tokens.

        Raises:
            Problem: As `refresh`; 429 if the token is unknown and the address sent too many wrong ones.
        """
        now = time.monotonic()
        if now - self._refreshed_at > _CACHE_S:
            if self._tokens is not None:
                self._refreshed_at = now
            await run_in_threadpool(self.refresh)
        elif self._may_be_new(authorization):
            self._check_failures(address)
            async with self._refresh_lock:
                if self._refreshed_at < now:  # Otherwise another request refreshed while this one waited.
                    await asyncio.sleep(self._refreshed_at + _REFRESH_S - time.monotonic())
                    await run_in_threadpool(self.refresh)

    @property
    def allows_anonymous(self) -> bool:
        """Whether requests need no token: none was ever created, and no proxy signs people on.

        Revoking the last token does not allow anonymous access.
        """
        settings = self._settings
        return not (settings.has_token or self._tokens or settings.sign_on_proxies) and settings.on_loopback

    def caller(self, authorization: str, address: str) -> Caller:
        """The caller that an `Authorization` header identifies.

        Raises:
            Problem: 401 without a valid token; 429 after too many wrong tokens from the address.
        """
        if self.allows_anonymous:
            return _ANONYMOUS
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer":
            raise Problem(
                401,
                "Token needed",
                "this collector needs a token as `Authorization: Bearer …`; clients read it from DDPOBS_TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )
        if (caller := self._find(token)) is not None:
            return caller
        # A generated token cannot be guessed; the token of the settings, which an operator chose, can.
        self._check_failures(address)
        if self._is_settings_token(token):
            return _SETTINGS_TOKEN
        self._record_failure(address, token)
        detail = "the token is unknown, expired or revoked"
        raise Problem(401, "Wrong token", detail, {"WWW-Authenticate": "Bearer"})

    def workspace(self, authorization: str) -> str | None:
        """Workspace that an `Authorization` header identifies; None without a valid token."""
        if self.allows_anonymous:
            return DEFAULT_WORKSPACE
        token = authorization.partition(" ")[2]
        if (caller := self._find(token)) is not None:
            return caller.workspace
        return DEFAULT_WORKSPACE if self._is_settings_token(token) else None

    def _may_be_new(self, authorization: str) -> bool:
        match, cached = _GENERATED.fullmatch(authorization), self._tokens or {}
        return match is not None and match[1] not in cached and not self._is_settings_token(authorization.split()[1])

    def _is_settings_token(self, token: str) -> bool:
        digest = _digest(token)
        return any(hmac.compare_digest(digest, own) for own in (*self._own_digests, *self._file_digests))

    def _find(self, text: str) -> Caller | None:
        prefix, _, suffix = text.partition("_")
        token_id, _, secret = suffix.partition("_")
        token = (self._tokens or {}).get(token_id) if prefix == "ddpobs" else None
        if token is None or not token.works(time.time_ns()) or not hmac.compare_digest(_digest(secret), token.digest):
            return None
        scopes = frozenset(SCOPES if "admin" in token.scopes else token.scopes)
        return Caller(token.workspace, scopes, token.name, "token", token_id)

    def _check_failures(self, address: str) -> None:
        with self._lock:
            failures = self._failures.get(address)
            if failures is None:
                return
            while failures and time.monotonic() - next(iter(failures.values())) > _FAILURES_S:
                failures.popitem(last=False)
            first = next(iter(failures.values()), 0.0)
            wait_s = _FAILURES_S - (time.monotonic() - first) if len(failures) >= MAX_FAILURES else 0.0
        if wait_s > 0:
            raise Problem(
                429,
                "Too many wrong tokens",
                f"{address} sent {MAX_FAILURES} different wrong tokens within {_FAILURES_S:.0f} s",
                {"Retry-After": str(int(wait_s) + 1)},
            )

    def _record_failure(self, address: str, token: str) -> None:
        """Count a wrong token once: many ranks behind an address may share an old one, which guesses nothing."""
        with self._lock:
            failures = self._failures.setdefault(address, OrderedDict())
            failures.setdefault(_digest(token), time.monotonic())
            while len(failures) > MAX_FAILURES:
                failures.popitem(last=False)
            self._failures.move_to_end(address)
            while len(self._failures) > _MAX_ADDRESSES:
                self._failures.popitem(last=False)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
