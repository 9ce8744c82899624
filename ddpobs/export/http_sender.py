"""Sending of one batch over HTTP, and the meaning of the collector's response."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - otherwise the first connection imports it, on any thread
import enum
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpcore
import msgspec

from ddpobs import wire
from ddpobs.config import TelemetryConfig, current_token

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LONGEST_WAIT_S = 300.0
_RETRIED = frozenset({408, 429})
_RESPONSE_BYTES = 64 * 1024
_PIECE_BYTES = 16 * 1024
NETWORK_ERRORS = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
)


class Outcome(enum.Enum):
    """Result of sending a batch."""

    STORED = "stored"
    REPEATED = "repeated"
    RETRY = "retry"
    FORBIDDEN = "forbidden"
    REFUSED = "refused"


@dataclass(frozen=True)
class Response:
    """The collector's response to a batch: the outcome, its own text, and the pause that it requests."""

    outcome: Outcome
    detail: str = ""
    retry_after_s: float = 0.0


class _DeadlineStream(httpcore.NetworkStream):
    """A connection with one deadline for all its operations, even if bytes arrive one by one.

    A socket's own timeout starts again with each byte.
    """

    def __init__(self, stream: httpcore.NetworkStream, left_s: Callable[[], float]) -> None:
        self._stream, self._left_s = stream, left_s

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _PIECE_BYTES):
            self._stream.write(buffer[start : start + _PIECE_BYTES], self._left_s())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, self._left_s()), self._left_s)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _DeadlineBackend(httpcore.SyncBackend):
    """Connections with reads and writes that end at `deadline`, on `time.monotonic`'s clock."""

    deadline = 0.0

    def left_s(self) -> float:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise httpcore.ReadTimeout("the request did not finish in time")
        return left_s

    def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        return _DeadlineStream(
            super().connect_tcp(host, port, *args, **{**kwargs, "timeout": self.left_s()}), self.left_s
        )


class Sender:
    """Sends batches to one collector, over one connection that stays open; no proxies, no redirects."""

    def __init__(self, config: TelemetryConfig) -> None:
        self._url = config.collector.rstrip("/")
        self._timeout_s = config.timeout_s
        self._config = config
        self._headers: list[tuple[str, str]] | None = None
        """Read with the first batch, and again after a rejected token: an operator may replace the token's file."""
        self._network = _DeadlineBackend()
        # Reading certificates takes time, and only https needs them.
        trusted = httpcore.default_ssl_context() if self._url.startswith("https:") else None
        self._pool = httpcore.ConnectionPool(trusted, max_connections=1, network_backend=self._network)

    def send(self, run: str, source: str, seq: int, body: bytes, within_s: float | None = None) -> Response:
        """Send one batch, in at most about `within_s` seconds, even if the response arrives slowly. Never raises.

        Only a name lookup may take longer. A 200 or 201 acknowledges the batch only if it echoes source and seq; a
        proxy's own 200 does not.
        """
        url = f"{self._url}/api/v1/runs/{run}/sources/{source}/batches/{seq}"
        self._network.deadline = time.monotonic() + (self._timeout_s if within_s is None else within_s)
        try:
            if self._headers is None:
                content = [("Content-Type", wire.MSGPACK), ("Content-Encoding", "zstd")]
                self._headers = [*request_headers(self._config), *content]
            with self._pool.stream("PUT", url, headers=self._headers, content=body) as stream:
                text = b""
                for piece in stream.iter_stream():
                    text += piece
                    if len(text) > _RESPONSE_BYTES:
                        return Response(Outcome.RETRY, "the response did not end within 64 KiB")
                headers = {name.lower(): value.decode("latin-1") for name, value in stream.headers}
                response = _meaning(stream.status, headers, text, source, seq)
                if response.outcome is Outcome.FORBIDDEN:
                    self._headers = None
                return response
        except (*NETWORK_ERRORS, OSError, ValueError) as error:
            return Response(Outcome.RETRY, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the connection."""
        self._pool.close()


def request_headers(config: TelemetryConfig) -> list[tuple[str, str]]:
    """Return the headers of every request to the collector: its host, and the token if there is one."""
    host = urlsplit(config.collector).netloc.rpartition("@")[2]  # httpcore omits the brackets of an IPv6 address.
    token = current_token(config)
    return [("Host", host), *([("Authorization", f"Bearer {token}")] if token else [])]


def pause_s(attempts: int, least_s: float, jitter: random.Random) -> float:
    """Return the pause before the next attempt: exponential backoff with full jitter, at least `least_s` seconds."""
    return max(least_s, jitter.uniform(0.0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempts, 10))))


def _meaning(status: int, headers: Mapping[bytes, str], text: bytes, source: str, seq: int) -> Response:
    detail = f"HTTP {status}: {text[:300].decode(errors='replace')}"
    if status in (200, 201):
        try:
            echo = wire.acknowledgement(text)
        except msgspec.MsgspecError:
            return Response(Outcome.RETRY, f"not a collector's response: {detail}")
        if (echo.source, echo.seq) != (source, seq):
            return Response(Outcome.RETRY, f"a response to another batch: {detail}")
        return Response(Outcome.REPEATED if echo.repeated else Outcome.STORED)
    if status in (401, 403, 421):
        return Response(Outcome.FORBIDDEN, detail)
    if 300 <= status < 400:
        detail = f"HTTP {status}: redirected to {headers.get(b'location')}; use the collector's own address"
    if status in _RETRIED or status >= 500 or 300 <= status < 400 or status == 404:
        # A 404 or a redirect comes from a server that is not a collector (yet): keep the data.
        return Response(Outcome.RETRY, detail, _retry_after_s(headers.get(b"retry-after", "0")))
    return Response(Outcome.REFUSED, detail)


def _retry_after_s(value: str) -> float:
    """Parse the header Retry-After: seconds, or a date as proxies write it (RFC 9110, section 10.2.3)."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(_LONGEST_WAIT_S, max(0.0, seconds))
