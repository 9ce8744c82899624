"""Settings of the training side: one frozen object, and the only reader of the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddpobs.errors import ConfigError
from ddpobs.wire.text import STRICT_RUN_ID

DEFAULT_COLLECTOR = "http://127.0.0.1:8321"
_TOKEN = re.compile(r"[\x21-\x7e]+")
_NUMBERS = {int: (Integral, "a whole number"), float: (Real, "a number")}
_END = 10**9


@dataclass(frozen=True)
class TelemetryConfig:
    """What telemetry sends, where, and how much it may hold.

    Each field is also `DDPOBS_<FIELD>` in the environment, and the collector is `DDPOBS_TELEMETRY`. Settings made in
    code are taken as they are: nothing of the environment joins them.

    Attributes:
        collector: The collector's address.
        run: Run id; None takes the launcher's, or one that rank 0 makes and shares.
        token: Bearer token for the collector.
        spool: Folder for batches that could not be sent; None keeps them under the system's temporary folder.
        spool_mb: Most that the spool may hold, in MB (10^6 bytes).
        queue_records: Most finished steps waiting for the telemetry thread; more are dropped and counted.
        batch_spans: A batch is closed when it holds this many records (steps, bucket spans and the like).
        flush_s: And at the latest after this many seconds, at the same moments on every rank. Each sends it at a moment
            of its own before the next is cut, so that ranks do not all send at once.
        timeout_s: How long one request to the collector may take, in seconds.
        exit_s: How long the flush at exit may take, in seconds.
        peers_every: Fewest new steps worth an exchange of straggler statistics among the ranks, tried twice a flush.
        readiness_every: Each parameter's readiness is sent every so many steps.
        pulse_s: Seconds between pulses, and so between the times that the telemetry thread wakes up.
    """

    collector: str = DEFAULT_COLLECTOR
    run: str | None = None
    token: str | None = field(default=None, repr=False)
    spool: str | Path | None = None
    spool_mb: float = 256.0
    queue_records: int = 4096
    batch_spans: int = 5000
    flush_s: float = 4.0
    timeout_s: float = 10.0
    exit_s: float = 2.0
    peers_every: int = 16
    readiness_every: int = 64
    pulse_s: float = 2.0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: Names the field.
        """
        if not _is_address(self.collector):
            raise ConfigError("collector", "an http:// or https:// address", self.collector)
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise ConfigError("token", "letters, digits and signs of ASCII, and no space or line end", "something else")
        if self.run is not None and not re.match(STRICT_RUN_ID, self.run):
            raise ConfigError("run", "1 to 128 of A-Z a-z 0-9 . _ -, and neither . nor ..", self.run)
        for setting in fields(self):
            value: Any = getattr(self, setting.name)
            kind = _NUMBERS.get(type(setting.default))
            if kind is not None and (
                type(value) is bool or not isinstance(value, kind[0]) or not 0 < float(value) < _END
            ):
                raise ConfigError(setting.name, f"{kind[1]} above zero and below {_END:,}", value)


def resolve(telemetry: bool | str | TelemetryConfig | None, environ: Mapping[str, str]) -> TelemetryConfig | None:
    """The settings that an argument and the environment ask for, or None for no telemetry.

    Args:
        telemetry: None (as the environment says), False, True, a collector's address, or settings, taken as they are.
        environ: The process's environment.

    Raises:
        ConfigError: A setting holds a value that it cannot have.
    """
    if isinstance(telemetry, TelemetryConfig):
        return telemetry
    flag = environ.get("DDPOBS_TELEMETRY", "0").strip()
    if telemetry is False or (telemetry is None and flag in ("", "0")):
        return None
    config = from_environment(environ)
    if isinstance(telemetry, str):
        return replace(config, collector=telemetry)
    return config


def from_environment(environ: Mapping[str, str]) -> TelemetryConfig:
    """Settings as the environment gives them; the collector is `DDPOBS_TELEMETRY`'s address where it holds one.

    Raises:
        ConfigError: Names the variable.
    """
    settings: dict[str, object] = {}
    flag = environ.get("DDPOBS_TELEMETRY", "1").strip()
    if flag not in ("", "0", "1"):
        settings["collector"] = flag
    for setting in fields(TelemetryConfig):
        name = f"DDPOBS_{setting.name.upper()}"
        if setting.name != "collector" and (text := environ.get(name, "").strip()):
            settings[setting.name] = _parse(name, text, type(setting.default))
    try:
        return TelemetryConfig(**settings)  # type: ignore[arg-type]
    except ConfigError as error:
        name = "DDPOBS_TELEMETRY" if error.setting == "collector" else f"DDPOBS_{error.setting.upper()}"
        raise ConfigError(name, error.expected, error.actual) from None


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # Of brackets that do not close, or a port that is none.
        return False


def _parse(name: str, text: str, kind: type) -> object:
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(name, "a whole number" if kind is int else "a number", text) from None
