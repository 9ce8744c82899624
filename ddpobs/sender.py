"""One batch over HTTP, and what the collector's answer means."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - else the first connection imports it
import enum
import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpcore
import httpx
import msgspec

from ddpobs import wire
from ddpobs.config import TelemetryConfig

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LONGEST_WAIT_S = 300.0
_RETRIED = frozenset({408, 429})
_ANSWER_BYTES = 64 * 1024


class Outcome(enum.Enum):
    """What became of a batch."""

    STORED = "stored"
    REPEATED = "repeated"
    RETRY = "retry"
    FORBIDDEN = "forbidden"
    REFUSED = "refused"


@dataclass(frozen=True)
class Answer:
    """An outcome, the collector's own words, and how long it asked to be left alone."""

    outcome: Outcome
    detail: str = ""
    retry_after_s: float = 0.0


class Sender:
    """Sends batches to one collector. Safe to close from any thread."""

    def __init__(self, config: TelemetryConfig) -> None:
        self._url = config.collector.rstrip("/")
        self._timeout_s = config.timeout_s
        headers = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}
        if config.token:
            headers["Authorization"] = f"Bearer {config.token}"
        # Certificates, which take time to read, are for https alone.
        verify = self._url.startswith("https:")
        self._client = httpx.Client(headers=headers, timeout=config.timeout_s, trust_env=False, verify=verify)

    def send(self, run: str, source: str, seq: int, body: bytes, within_s: float | None = None) -> Answer:
        """Send one batch; returns within about `within_s` seconds, however slowly the other side answers. Never raises.

        Only a 200 or 201 that echoes source and seq acknowledges: a proxy's own 200 does not.
        """
        url = f"{self._url}/api/v1/runs/{run}/sources/{source}/batches/{seq}"
        limit_s = self._timeout_s if within_s is None else within_s
        deadline = time.monotonic() + limit_s
        try:
            with self._client.stream("PUT", url, content=body, timeout=limit_s) as response:
                text = b""
                # A read time-out runs anew with each byte, so the whole is bounded here.
                for piece in response.iter_bytes():
                    text += piece
                    if time.monotonic() > deadline or len(text) > _ANSWER_BYTES:
                        return Answer(Outcome.RETRY, "the answer did not end")
                return _meaning(response, text, source, seq)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return Answer(Outcome.RETRY, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def pause_s(attempts: int, asked_s: float, jitter: random.Random) -> float:
    """How long to wait before the next try: exponential, full jitter, never less than the collector asked for."""
    return max(asked_s, jitter.uniform(0.0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempts, 10))))


def _meaning(response: httpx.Response, text: bytes, source: str, seq: int) -> Answer:
    status, detail = response.status_code, f"HTTP {response.status_code}: {text[:300].decode(errors='replace')}"
    if status in (200, 201):
        try:
            echo = msgspec.json.decode(text, type=wire.Acknowledgement)
        except msgspec.MsgspecError:
            return Answer(Outcome.RETRY, f"not a collector's answer: {detail}")
        if (echo.source, echo.seq) != (source, seq):
            return Answer(Outcome.RETRY, f"the answer to another batch: {detail}")
        return Answer(Outcome.REPEATED if echo.repeated else Outcome.STORED)
    if status in (401, 403, 421):
        return Answer(Outcome.FORBIDDEN, detail)
    if status in _RETRIED or status >= 500 or 300 <= status < 400 or status == 404:
        # A 404 or a redirect comes from something that is no collector (yet): keep the data.
        return Answer(Outcome.RETRY, detail, _retry_after_s(response))
    return Answer(Outcome.REFUSED, detail)


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds, or a date as proxies write it (RFC 9110, section 10.2.3)."""
    asked = response.headers.get("Retry-After", "0")
    try:
        seconds = float(asked)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(asked).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(_LONGEST_WAIT_S, max(0.0, seconds))
