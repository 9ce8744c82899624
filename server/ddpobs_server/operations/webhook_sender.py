"""Sends messages to the webhook one after the other, with retries. No proxies, no redirects."""

from __future__ import annotations

import logging
import random
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit

import httpcore
from prometheus_client import CollectorRegistry, Counter

from ddpobs_server.operations.webhook_message import Message, headers_of

_log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
"""Longest wait for the connection, and for a part of the response."""
FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_WAIT_S = 1.0, 60.0, 300.0
"""Pauses after failures, which double, and the longest one that a receiver's `Retry-After` may request."""
MAX_AGE_S = 600.0
"""Age at which a message is given up."""
MAX_WAITING = 1000
"""Messages that may wait."""
_RETRIED = frozenset({408, 425, 429})
Outcome = Literal["sent", "retried", "refused", "expired"]


class WebhookSender:
    """A bounded queue of messages to one receiver. Used by one thread.

    Args:
        url: Address of the receiver; a secret.
        secret: Key of the signatures; None for none.
        registry: Receives the metric.
        now_s: A monotonic clock.
    """

    def __init__(
        self, url: str, secret: str | None, registry: CollectorRegistry, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._url, self._secret, self._now_s = url, secret, now_s
        self._host = urlsplit(url).hostname or ""
        self._waiting: deque[tuple[float, Message]] = deque()
        self._failures, self._due_s = 0, float("-inf")
        self._count = Counter("ddpobs_server_webhook_messages", "Messages by outcome.", ["outcome"], registry=registry)
        for outcome in Outcome.__args__:  # type: ignore[attr-defined]
            self._count.labels(outcome)

    @property
    def free(self) -> int:
        """Number of further messages that may wait."""
        return MAX_WAITING - len(self._waiting)

    @property
    def waiting(self) -> list[Message]:
        """The messages that wait, oldest first."""
        return [message for _, message in self._waiting]

    @property
    def wait_s(self) -> float:
        """Seconds until the next attempt; infinite without a message."""
        return max(0.0, self._due_s - self._now_s()) if self._waiting else float("inf")

    def put(self, message: Message) -> None:
        """Let a message wait."""
        self._waiting.append((self._now_s(), message))

    def send_next(self) -> Message | None:
        """Try to send the oldest message. Returns it if it arrived. A message that is refused or too old is dropped."""
        since_s, message = self._waiting[0]
        outcome, reason, retry_after_s = self._post(message)
        if outcome == "retried" and self._now_s() - since_s > MAX_AGE_S:
            outcome = "expired"
        self._count.labels(outcome).inc()
        if outcome == "retried":
            pause_s = min(_LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._failures) * random.uniform(0.5, 1.0)
            self._failures = min(self._failures + 1, 10)
            self._due_s = self._now_s() + max(pause_s, retry_after_s)
        else:
            self._waiting.popleft()
            self._failures, self._due_s = 0, float("-inf")
        if outcome != "sent":
            _log.warning("the webhook at %s %s a message: %s", self._host, _WORDS[outcome], reason)
        return message if outcome == "sent" else None

    def _post(self, message: Message) -> tuple[Outcome, str, float]:
        """Return the outcome, its reason, and the pause that the receiver requests."""
        headers = headers_of(message, self._secret, int(time.time()))
        context = ssl.create_default_context() if self._url.startswith("https:") else None
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), _TIMEOUT_S)
        try:
            with (
                httpcore.ConnectionPool(context, keepalive_expiry=0) as pool,
                pool.stream(
                    "POST",
                    self._url,
                    headers=list(headers.items()),
                    content=message.body,
                    extensions={"timeout": timeouts},
                ) as response,
            ):
                status, sent = response.status, {name.lower(): value for name, value in response.headers}
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError) as error:
            return "retried", f"{type(error).__name__}: {error}", 0.0
        reason = f"HTTP {status}"
        if 200 <= status < 300:
            return "sent", reason, 0.0
        if status in _RETRIED or status >= 500:
            return "retried", reason, _seconds(sent.get(b"retry-after", b""))
        return "refused", reason, 0.0


_WORDS: dict[Outcome, str] = {
    "retried": "did not accept",
    "refused": "refused, and will never get,",
    "expired": f"did not accept within {MAX_AGE_S:g} s",
}


def _seconds(retry_after: bytes) -> float:
    """Return the seconds of a `Retry-After`; 0 for a date, after which the usual pause applies."""
    return min(_LONGEST_WAIT_S, float(retry_after)) if retry_after.isdigit() else 0.0
