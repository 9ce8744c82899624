"""`docker-compose.yml` started by a real Docker engine, and a real training beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.rig import patience
from benchmarks.rig.training import ROOT, TORCHRUN
from tests.support.compose import BEARER, TOKEN, URL, Stack, stack
from tests.support.containers import shell

pytestmark = [
    pytest.mark.wide,
    pytest.mark.timeout(1800),
]  # The image is built first, and one compose file runs at a time.
COMPOSE = "docker-compose.yml"
CRASHING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(30):
    if step == 20 and dist.get_rank() == 1:
        raise ValueError("a bad sample")
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(COMPOSE, tmp_path_factory.mktemp("compose")) as started:
        yield started


def train(url: str, run: str, folder: Path) -> None:
    """Train on this machine until rank 1 fails."""
    script = folder / "train.py"
    script.write_text(CRASHING)
    environ = os.environ | {"DDPOBS_TELEMETRY": url, "DDPOBS_TOKEN": TOKEN, "DDPOBS_RUN": run, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "server")])
    ddpobs = Path(sys.executable).with_name("ddpobs")
    ended = patience.run([ddpobs, "run", "--", *TORCHRUN, script], environ=environ)
    assert ended.returncode == 1, ended.stderr
    assert "a bad sample" in ended.stderr


def alerts(name: str) -> list[dict[str, str]]:
    """Labels of the alerts of this name in the Alertmanager."""
    found = httpx.get("http://127.0.0.1:9093/api/v2/alerts").json()
    return [alert["labels"] for alert in found if alert["labels"]["alertname"] == name]


def runs() -> set[str]:
    return {run["run"] for run in httpx.get(f"{URL}/api/v1/runs", headers=BEARER).json()["runs"]}


def test_a_crash_is_in_the_metrics_and_an_alert_and_everything_remains_after_a_restart(
    services: Stack, tmp_path: Path
) -> None:
    train(URL, "crashing", tmp_path)
    patience.until(lambda: services.value('ddpobs_steps_total{run="crashing"}') >= 20, services.logs)
    assert services.value('up{job="ddpobs-collector"}') == 1
    patience.until(lambda: alerts("DdpobsCrash"), services.logs)
    assert {labels["run"] for labels in alerts("DdpobsCrash")} == {"crashing"}

    ids = [services.container(name) for name in services.names]
    services.compose("stop")
    assert {name: services.state(name)["State"]["ExitCode"] for name in services.names} == dict.fromkeys(
        services.names, 0
    )
    services.compose("down")
    services.up()
    assert not set(ids) & {services.container(name) for name in services.names}
    assert runs() == {"crashing"}
    assert services.value('max_over_time(ddpobs_steps_total{run="crashing"}[1h])') >= 20


def test_a_collector_waits_for_a_database_that_starts_again(services: Stack) -> None:
    services.compose("restart", "postgres")
    patience.until(lambda: httpx.get(f"{URL}/readyz").status_code == 200, services.logs)
    assert httpx.get(f"{URL}/api/v1/runs", headers=BEARER).status_code == 200
    assert services.state("collector")["RestartCount"] == 0


def test_the_collector_has_no_root_no_capability_and_a_read_only_file_system(services: Stack) -> None:
    collector = services.container("collector")
    assert set(shell(collector, "grep -h ^Uid: /proc/[0-9]*/status").split()) == {"Uid:", "8321"}
    assert shell(collector, "grep -h ^CapEff: /proc/[0-9]*/status | sort -u").split() == ["CapEff:", "0" * 16]
    assert "Read-only" in shell(collector, "touch /etc/file", check=False)
    assert services.state("collector")["Mounts"] == []  # Nameless volumes would remain after each `down`.
    assert httpx.get(f"{URL}/api/v1/runs").status_code == 401


def test_only_the_collector_is_open_to_other_machines(services: Stack) -> None:
    published = {
        (name, binding["HostIp"])
        for name in services.names
        for bindings in services.state(name)["NetworkSettings"]["Ports"].values()
        for binding in bindings or []
        if ":" not in binding["HostIp"]
    }
    assert published == {("collector", "0.0.0.0"), ("alertmanager", "127.0.0.1")}
