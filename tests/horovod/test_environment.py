"""Horovod's settings in the environment: which have a meaning here, and the log's answer to the others."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import ddpobs.horovod as hvd
from ddpobs import TelemetryConfig
from ddpobs.errors import HorovodError
from ddpobs.horovod.environment import with_stall_check


def test_settings_without_an_effect_are_answered_and_the_timeline_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "timeline.json"
    for name, value in {"AUTOTUNE": "1", "CYCLE_TIME": "0", "STALL_CHECK_DISABLE": "1", "TIMELINE": str(path)}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    with caplog.at_level(logging.WARNING, "ddpobs"):
        hvd.init()
        hvd.shutdown()
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("ddpobs: HOROVOD_AUTOTUNE=1 has no effect: buckets are those of DDP")
    assert second.startswith("ddpobs: HOROVOD_STALL_CHECK_DISABLE=1 has no effect: telemetry reports a hang")
    assert json.loads(path.read_text())[0]["name"] == "process_name"


def test_the_stall_check_is_the_time_after_which_telemetry_reports_a_hang() -> None:
    config, text = TelemetryConfig(), {"HOROVOD_STALL_CHECK_TIME_SECONDS": "60"}
    assert with_stall_check(config, text).hang_after_s == 60
    assert with_stall_check(config, text | {"DDPOBS_HANG_AFTER_S": "8"}) == config
    assert with_stall_check(config, {}) == config
    with pytest.raises(HorovodError, match="HOROVOD_STALL_CHECK_TIME_SECONDS: expected a number of seconds"):
        with_stall_check(config, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "soon"})
