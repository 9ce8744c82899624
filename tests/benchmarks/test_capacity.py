"""Throughput of a collector: what `benchmarks.capacity` measures, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import capacity
from benchmarks.loads import Load, flood, job


@pytest.mark.parametrize("load", [flood(clients=2, batches=2), job(ranks=8, seconds=4, clients=2)])
def test_a_measurement_loses_no_span_and_ignores_settings_of_the_environment(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TOKEN": "secret", "HOST": "0.0.0.0", "MAX_RANKS": "1", "KEEP_GB": "1e-9"}.items():
        monkeypatch.setenv(f"DDPOBS_SERVER_{name}", value)
    results = capacity.measure(load)
    assert results["lost"] == 0
    assert results["bytes_per_span"] > 0
    assert results["cpu_ns_per_span"] >= 0


def test_a_failure_is_reported_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.capacity", "--clients", "1", "--batches", "1"]
    for options, code in (["--clients", "0"], 2), (["--database-url", f"sqlite:///{tmp_path}/none/runs.db"], 1):
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
    assert done.stderr.startswith("capacity: no collector: ")


def test_a_measurement_reports_a_crashed_client() -> None:
    def crash(*_: object) -> capacity.Sent:
        os._exit(139)

    with capacity.senders(2, crash) as pipes, pytest.raises(RuntimeError, match="a client ended without an answer"):
        capacity.drive(pipes, os.getpid(), "")
