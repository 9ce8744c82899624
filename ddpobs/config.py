"""Settings of the training side: a frozen object, and the only code that reads the environment's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddpobs.errors import ConfigError
from ddpobs.wire.text import NOTE_CHARACTERS, STRICT_RUN_ID, clean_tags, clean_token

DEFAULT_COLLECTOR = "http://127.0.0.1:8321"
_NUMBERS = {int: (Integral, "a whole number"), float: (Real, "a number")}
_ZERO_SWITCHES_OFF = ("fingerprint_every", "rest_every")
_MIN_REST_EVERY, _MAX_REST_EVERY = 64, 8192
"""A rest needs two steps, and the times of a cycle's steps are kept until it ends."""
_END = 10**9


@dataclass(frozen=True)
class TelemetryConfig:
    """Destination, limits and periods of telemetry.

    In the environment a field is `DDPOBS_<FIELD>`, and the collector is `DDPOBS_TELEMETRY`. If the code passes
    settings, those of the environment are ignored.

    Attributes:
        collector: Address of the collector.
        run: Run id; None for the launcher's, or for the script's name with the time.
        token: Bearer token for the collector.
        token_file: File with the token, if `token` is None. It is read again after the collector rejects the token.
        spool: Folder for unsent batches; None for a folder under the system's temporary folder.
        spool_mb: Limit of the spool's size, in MB (10^6 bytes).
        queue_records: Most finished steps that wait for the telemetry thread; further steps are dropped and counted.
        batch_spans: Number of records (steps, bucket spans and others) at which a batch is closed.
        flush_s: Longest time before a batch is closed, in seconds. All ranks close their batches at the same moments.
            Each rank sends its batch at another moment before the next one is closed.
        timeout_s: Longest duration of one request to the collector, in seconds.
        exit_s: Longest duration of the flush at exit, in seconds.
        peers_every: Fewest new steps for an exchange of straggler statistics among the ranks, attempted twice a flush.
        fingerprint_every: Number of synchronised backward passes between comparisons of the replicas; 0 for none.
        readiness_every: Number of steps between samples of every parameter's readiness.
        hang_after_s: Least time without progress after which a rank counts as stuck, in seconds.
        rest_every: Steps of a cycle, 64 to 8192, in which telemetry rests for every 32nd step, to measure its own cost;
            0 for never.
        pulse_s: Seconds between pulses, and therefore between wake-ups of the telemetry thread.
        traceback: Send the message and the last lines of the traceback of an error that ends the training.
        quiet: Print neither the run's address at the start nor its verdict at the end.
        tags: Words by which the run is found in the list; as a text, with commas between them.
        note: A sentence about the run, for people.
    """

    collector: str = DEFAULT_COLLECTOR
    run: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | Path | None = None
    spool: str | Path | None = None
    spool_mb: float = 256.0
    queue_records: int = 4096
    batch_spans: int = 5000
    flush_s: float = 2.0
    timeout_s: float = 10.0
    exit_s: float = 2.0
    peers_every: int = 16
    fingerprint_every: int = 1000
    readiness_every: int = 64
    rest_every: int = 0
    pulse_s: float = 2.0
    hang_after_s: float = 8.0
    traceback: bool = True
    quiet: bool = False
    tags: str | Sequence[str] = ""
    note: str = ""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field has an invalid value.
        """
        if not _is_address(self.collector):
            raise ConfigError("collector", "an http:// or https:// address", self.collector)
        if self.token is not None:
            object.__setattr__(self, "token", _clean_token(self.token))
        if self.run is not None and not re.match(STRICT_RUN_ID, self.run):
            raise ConfigError("run", "1 to 128 of A-Z a-z 0-9 . _ -, and neither . nor ..", self.run)
        object.__setattr__(self, "tags", _clean_tags(self.tags))
        if not isinstance(self.note, str) or len(self.note) > NOTE_CHARACTERS:
            raise ConfigError("note", f"a text of at most {NOTE_CHARACTERS} characters", self.note)
        cycle = self.rest_every
        if isinstance(cycle, Integral) and cycle != 0 and not _MIN_REST_EVERY <= int(cycle) <= _MAX_REST_EVERY:
            raise ConfigError("rest_every", f"0, or a whole number from {_MIN_REST_EVERY} to {_MAX_REST_EVERY}", cycle)
        for setting in fields(self):
            value: Any = getattr(self, setting.name)
            if type(setting.default) is bool and type(value) is not bool:
                raise ConfigError(setting.name, "True or False", value)
            kind = _NUMBERS.get(type(setting.default))
            may_be_zero = setting.name in _ZERO_SWITCHES_OFF
            if kind is not None and (
                type(value) is bool
                or not isinstance(value, kind[0])
                or not (0 < float(value) < _END or (may_be_zero and value == 0))
            ):
                least = "of at least zero" if may_be_zero else "above zero"
                raise ConfigError(setting.name, f"{kind[1]} {least} and below {_END:,}", value)


def current_token(config: TelemetryConfig) -> str | None:
    """Return the token of the settings, or the first line of its file; None without either.

    Raises:
        ConfigError: The file cannot be read, or has no token in its first line.
    """
    if config.token is not None or config.token_file is None:
        return config.token
    try:
        return _clean_token(Path(config.token_file).read_text(encoding="ascii", errors="replace").partition("\n")[0])
    except OSError as error:
        raise ConfigError("token_file", "a readable file with a token", f"{config.token_file}: {error}") from None


def resolve(telemetry: bool | str | TelemetryConfig | None, environ: Mapping[str, str]) -> TelemetryConfig | None:
    """Return the settings for an argument and the environment; None for no telemetry.

    Args:
        telemetry: None (the environment decides), False, True, a collector's address, or settings, which are returned
            unchanged.
        environ: The process's environment.

    Raises:
        ConfigError: A setting has an invalid value.
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
    """Read the settings from the environment; the collector is the address in `DDPOBS_TELEMETRY`, if it has one.

    Raises:
        ConfigError: A variable has an invalid value.
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


def wants_ranges(environ: Mapping[str, str]) -> bool:
    """Return whether `DDPOBS_RANGES` asks for NVTX ranges; it applies without telemetry, too.

    Raises:
        ConfigError: The variable is neither 0 nor 1.
    """
    return bool(_parse("DDPOBS_RANGES", environ.get("DDPOBS_RANGES", "").strip() or "0", bool))


def _clean_token(text: str) -> str:
    try:
        return clean_token(text)
    except ValueError:
        raise ConfigError("token", "ASCII letters, digits and signs without spaces inside", "another text") from None


def _clean_tags(tags: str | Sequence[str]) -> tuple[str, ...]:
    try:
        return clean_tags(tags.split(",") if isinstance(tags, str) else tags)
    except (ValueError, AttributeError, TypeError):
        raise ConfigError("tags", "at most 16 tags of at most 64 printable characters, without commas", tags) from None


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # For example, an unclosed bracket or an invalid port.
        return False


def _parse(name: str, text: str, kind: type) -> object:
    if kind is bool:
        if text not in ("0", "1"):
            raise ConfigError(name, "0 or 1", text)
        return text == "1"
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(name, "a whole number" if kind is int else "a number", text) from None
