"""Findings about communication, each with a real training that must raise it and one that must not.

Links of a chosen speed need root and iproute2. Without them these tests are skipped, and fail in CI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import links
from benchmarks.faults.launch import COMMUNICATING, Ranks, ranks_of

pytestmark = pytest.mark.alone

CHANGE_STEP = 40
PREDICTED = ("bucket-size", "compression-pays", "accumulation-pays")
Findings = dict[str, dict[str, Any]]


@contextmanager
def training(folder: Path, case: str, ranks: int, environ: dict[str, str], **network: Any) -> Iterator[Ranks]:
    """Train into a spool, because a namespace does not reach the collector."""
    unreachable = {"DDPOBS_TELEMETRY": "http://127.0.0.1:9", "DDPOBS_RUN": folder.name, "DDPOBS_READINESS_EVERY": "8"}
    unreachable |= {"DDPOBS_EXIT_S": "30"}
    with ranks_of(COMMUNICATING, case, ranks=ranks, folder=folder, environ=unreachable | environ, **network) as running:
        yield running
        codes = [process.wait(180) for process in running.processes]
        assert codes == [0] * ranks, running.logs()


def diagnosed(url: str, folder: Path) -> Findings:
    """Send the spool, and return the run's findings by code."""
    push = [str(Path(sys.executable).with_name("ddpobs")), "push", str(folder / "spool"), "--collector", url]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    subprocess.run(push, check=True, env=environ)
    answer = httpx.get(f"{url}/api/v1/runs/{folder.name}/diagnostics")
    answer.raise_for_status()
    return {finding["code"]: finding for finding in answer.json()["findings"]}


def over_links(url: str, folder: Path, case: str, rate: str, *, later: str = "", steps: int = 70) -> Findings:
    """Train on two hosts with links of this rate, changed to `later` after `CHANGE_STEP` steps."""
    environ = {"STEPS": str(steps), "READY_STEP": str(CHANGE_STEP), "GLOO_SOCKET_IFNAME": links.INTERFACE}
    try:
        with (
            links.links(2, rate) as network,
            training(
                folder,
                case,
                2,
                environ,
                namespaces=lambda rank: network.namespaces(rank, "net", "uts"),
                master=links.address(0),
            ) as running,
        ):
            if later:
                running.wait_for_fault()
                network.set_rate(later)
    except links.LinkError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    return diagnosed(url, folder)


def on_one_host(url: str, folder: Path, case: str, ranks: int = 2, steps: int = 100) -> Findings:
    with training(folder, case, ranks, {"STEPS": str(steps)}):
        pass
    return diagnosed(url, folder)


def test_a_link_that_slows_down_is_named_with_its_steps(url: str, tmp_path: Path) -> None:
    findings = over_links(url, tmp_path / "slower-link", "bytes", "400mbit", later="100mbit")
    slow = findings["network-slow"]
    assert abs(slow["steps"][0] - CHANGE_STEP) <= 8
    assert slow["evidence"]["ratio"] > 2
    assert slow["evidence"]["bytes_per_s"] < 20e6
    assert slow["severity"] == "critical"


def test_a_slow_link_of_constant_speed_is_a_matter_of_bandwidth(url: str, tmp_path: Path) -> None:
    findings = over_links(url, tmp_path / "slow-link", "bytes", "200mbit")
    assert "network-slow" not in findings
    assert "straggler" not in findings  # Nor a slow host: both ends of a slow link wait alike.
    bound = findings["comm-bound"]
    assert (bound["evidence"]["kind"], bound["severity"]) == ("bandwidth", "critical")
    assert "Compress" in bound["remedy"]
    assert 15e6 < bound["evidence"]["bytes_per_s"] < 30e6
    assert bound["gain"]["ratio"] > 0.25
    assert findings["scaling-loss"]["evidence"]["efficiency"] < 0.5
    assert findings["compression-pays"]["gain"]["ratio"] > 0.25
    assert findings["accumulation-pays"]["gain"]["ratio"] > 0.4


@pytest.mark.wide
def test_buckets_in_another_order_than_the_gradients_are_named(url: str, tmp_path: Path) -> None:
    reversed_order = over_links(url, tmp_path / "reversed", "order", "200mbit", steps=50)["bucket-order"]
    assert reversed_order["evidence"]["find_unused_parameters"]
    assert len(reversed_order["parameters"]) >= 2
    assert reversed_order["gain"]["ratio"] > 0.05
    in_order = over_links(url, tmp_path / "in-order", "balanced", "200mbit", steps=50)
    assert "bucket-order" not in in_order


def test_a_step_time_that_swings_is_named_with_its_period(url: str, tmp_path: Path) -> None:
    swings = on_one_host(url, tmp_path / "swings", "swings")["utilisation-swings"]
    assert swings["evidence"]["period_steps"] == 20
    assert swings["evidence"]["swing"] > 0.2


def test_a_steady_run_has_none_of_these_findings(url: str, tmp_path: Path) -> None:
    findings = on_one_host(url, tmp_path / "steady", "steady")
    assert findings.get("utilisation-swings", {"severity": "info"})["severity"] == "info"
    assert findings.keys() & {"comm-bound", "network-slow", "bucket-order", "scaling-loss", *PREDICTED} == set()


def test_a_balanced_small_model_on_one_host_is_never_told_to_move_less(url: str, tmp_path: Path) -> None:
    findings = on_one_host(url, tmp_path / "small", "small")
    assert findings["scaling-loss"]["severity"] == "info"
    bound = findings.get("comm-bound")
    if bound is not None:
        assert bound["severity"] != "critical" or bound["gain"]
        assert bound["evidence"]["kind"] != "bandwidth"
        assert "ompress" not in bound["remedy"]


def test_one_rank_has_no_finding_about_communication(url: str, tmp_path: Path) -> None:
    findings = on_one_host(url, tmp_path / "one-rank", "small", ranks=1)
    assert findings.keys() & {"comm-bound", "network-slow", "bucket-order", "scaling-loss", *PREDICTED} == set()
