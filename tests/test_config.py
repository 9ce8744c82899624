"""Settings of the training side: sources, precedence and refused values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpobs import TelemetryConfig
from ddpobs.config import DEFAULT_COLLECTOR, from_environment, resolve, wants_ranges
from ddpobs.errors import ConfigError

ELSEWHERE = "http://elsewhere:1"


@pytest.mark.parametrize(
    ("telemetry", "flag", "collector"),
    [
        (None, None, None),
        (None, "", None),
        (None, "0", None),
        (None, "1", DEFAULT_COLLECTOR),
        (None, ELSEWHERE, ELSEWHERE),
        (False, ELSEWHERE, None),
        (True, None, DEFAULT_COLLECTOR),
        (True, "0", DEFAULT_COLLECTOR),
        (True, ELSEWHERE, ELSEWHERE),
        ("http://here:2", ELSEWHERE, "http://here:2"),
        (TelemetryConfig(collector="http://here:2"), "0", "http://here:2"),
    ],
)
def test_the_argument_takes_precedence_over_the_environment(
    telemetry: Any, flag: str | None, collector: str | None
) -> None:
    config = resolve(telemetry, {} if flag is None else {"DDPOBS_TELEMETRY": flag})
    assert (config and config.collector) == collector


def test_settings_from_code_ignore_the_environment() -> None:
    config = TelemetryConfig(run="mine")
    assert resolve(config, {"DDPOBS_RUN": "theirs", "DDPOBS_FLUSH_S": "9"}) is config


def test_every_field_has_its_variable() -> None:
    environ = {"RUN": "r", "TOKEN": "t", "SPOOL": "/s", "SPOOL_MB": "1.5", "QUEUE_RECORDS": "7", "FLUSH_S": "0.5"}
    config = from_environment({f"DDPOBS_{name}": value for name, value in environ.items()})
    assert config == TelemetryConfig(run="r", token="t", spool="/s", spool_mb=1.5, queue_records=7, flush_s=0.5)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, 10**12, "1", None, True])
@pytest.mark.parametrize("setting", ["spool_mb", "queue_records", "timeout_s", "exit_s", "peers_every"])
def test_an_invalid_number_is_refused_when_the_settings_are_created(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        TelemetryConfig(**{setting: value})


@pytest.mark.parametrize("cycle", [1, 63, 8193, 10**6])
def test_rests_come_in_cycles_of_64_to_8192_steps(cycle: int) -> None:
    assert [TelemetryConfig(rest_every=allowed).rest_every for allowed in (0, 64, 8192)] == [0, 64, 8192]
    with pytest.raises(ConfigError, match="from 64 to 8192"):
        TelemetryConfig(rest_every=cycle)


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("", True)])
def test_tracebacks_can_be_kept_out(text: str, value: bool) -> None:
    assert from_environment({"DDPOBS_TRACEBACK": text}).traceback is value


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("", False)])
def test_nvtx_ranges_are_wanted_by_the_environment(text: str, value: bool) -> None:
    assert wants_ranges({"DDPOBS_RANGES": text}) is value
    with pytest.raises(ConfigError, match="DDPOBS_RANGES"):
        wants_ranges({"DDPOBS_RANGES": "yes"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DDPOBS_SPOOL_MB", "inf"),
        ("DDPOBS_QUEUE_RECORDS", "1.5"),
        ("DDPOBS_FLUSH_S", "soon"),
        ("DDPOBS_TRACEBACK", "no"),
        ("DDPOBS_RUN", "a/b"),
        ("DDPOBS_RUN", ".."),
        ("DDPOBS_TELEMETRY", "yes"),
        ("DDPOBS_TELEMETRY", "ftp://here"),
        ("DDPOBS_TELEMETRY", "http://[::1"),
        ("DDPOBS_TELEMETRY", "http://here:99999"),
        ("DDPOBS_TELEMETRY", "http://here:abc"),
    ],
)
def test_an_invalid_value_is_reported_with_its_variable(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable) as refused:
        from_environment({variable: value})
    assert value in str(refused.value)


def test_numbers_of_numpy_are_numbers_and_counts_are_whole() -> None:
    assert TelemetryConfig(peers_every=np.int64(20), flush_s=np.float32(2)).peers_every == 20  # type: ignore[arg-type]
    assert TelemetryConfig(flush_s=2).flush_s == 2
    with pytest.raises(ConfigError, match="whole number"):
        TelemetryConfig(peers_every=20.0)  # type: ignore[arg-type]


def test_a_spool_may_be_a_path_or_a_string() -> None:
    assert TelemetryConfig(spool="/tmp/x").spool == "/tmp/x"
    assert TelemetryConfig(spool=Path("/tmp/x")).spool == Path("/tmp/x")


def test_a_token_loses_its_line_end_and_is_never_printed() -> None:
    config = from_environment({"DDPOBS_TOKEN": "s3cret\n"})
    assert config.token == "s3cret"
    assert "s3cret" not in repr(config)
    with pytest.raises(ConfigError, match="token") as refused:
        TelemetryConfig(token="s3cret two")
    assert "s3cret" not in str(refused.value)


def test_only_fingerprints_are_switched_off_by_zero() -> None:
    assert from_environment({"DDPOBS_FINGERPRINT_EVERY": "0"}).fingerprint_every == 0
    with pytest.raises(ConfigError, match="of at least zero"):
        TelemetryConfig(fingerprint_every=-1)
    with pytest.raises(ConfigError, match="above zero"):
        TelemetryConfig(readiness_every=0)
