"""`ddpobs check-hosts` with real ranks: a slow host stops the launch, hosts that are alike run the script."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from benchmarks import links
from benchmarks.rig import patience
from benchmarks.rig.collector import collector
from ddpobs.launch.host_check.order import SLOW_HOST
from tests.support.control_groups import quota_group
from tests.support.integration.run_command import NO_COLLECTOR, command

SCRIPT = """
import os
import pathlib
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert "DDPOBS_CHECK_HOSTS" not in os.environ
pathlib.Path(sys.argv[1] + os.environ["RANK"]).write_text(str(int(total)))
dist.destroy_process_group()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "2")


def check(
    *arguments: object, options: Sequence[str] = (), url: str = NO_COLLECTOR, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Start Python under `ddpobs check-hosts`."""
    started = command(*arguments, url=url, by=("check-hosts", *options))
    return patience.run(started["args"], environ=started["env"] | environ)


def test_hosts_that_are_alike_run_the_script_in_the_same_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # No load of this machine makes a rank a thousand times slower than another.
    options = ("--seconds", "1", "--limit", "1000", "--disk", str(tmp_path))
    done = check(*TORCHRUN, "--nproc-per-node", "2", script, tmp_path / "rank", options=options)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2", "2"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("ddpobs: ")]
    assert lines[0].startswith("ddpobs: checked 2 ranks on 1 host in ")
    assert "with 5 repetitions" in lines[0]
    assert lines.pop().startswith(
        "ddpobs: not known: the history of the hosts: http://127.0.0.1:9/api/v1/host-checks: "
    )
    assert lines[1:] == [
        "ddpobs: hosts are alike: none is slower by 1000× in 80 % of the repetitions",
        "ddpobs: not known: which of the 2 ranks delays the exchange: each has the other as its only partner",
    ]
    assert done.stderr.count("matrix products") == 1


def test_a_later_check_compares_a_host_with_its_earlier_checks(tmp_path: Path) -> None:
    rank = ("--nproc-per-node", "2", "--no-python", sys.executable, "-c", "pass")
    options = ("--seconds", "1", "--limit", "1000", "--disk", str(tmp_path))
    with collector(tmp_path) as running:
        first = check(*TORCHRUN, *rank, options=options, url=running.url)
        assert "ddpobs: not known: earlier checks: no host has 3 with as many ranks" in first.stderr, first.stderr
        fast = {"host": socket.gethostname(), "ranks": 2, "rates": {"matrix products": 1e30}}
        for _ in range(3):  # Most of the earlier checks were much faster.
            httpx.post(f"{running.url}/api/v1/host-checks", json={"device": "CPUs", "hosts": [fast]}).raise_for_status()
        done = check(*TORCHRUN, *rank, options=options, url=running.url)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ddpobs: ")]
    assert lines[-1] == "ddpobs: compared with earlier checks: 1 of 1 host"
    (slower,) = [line for line in lines if " earlier checks (" in line]
    assert slower.startswith(f"ddpobs: {socket.gethostname()}: matrix products slower by ")
    assert "× than in 4 earlier checks (" in slower


NOTE = "import os; from ddpobs.launch.host_check.order import note; note(os.environ, is_slow=True)"


def test_what_a_rank_noted_of_a_slow_host_is_the_exit_status_whatever_the_launchers_is() -> None:
    done = check("-c", NOTE)
    assert (done.returncode, done.stderr) == (SLOW_HOST, "")
    assert not list(Path(os.environ["DDPOBS_SPOOL"]).rglob("*.hosts"))


@pytest.mark.parametrize(
    ("environ", "seconds", "reason"),
    [
        ({}, "1", "no rank was started: torchrun, mpiexec or the variable RANK makes a process a rank"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "1", "one rank has none to be compared with"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "0.5",
            "2 repetitions of each measure fit into 0.5 s, and at least 5 are needed: raise --seconds",
        ),
    ],
)
def test_a_script_runs_where_hosts_are_not_compared(environ: dict[str, str], seconds: str, reason: str) -> None:
    done = check("-c", "raise SystemExit(37)", options=("--seconds", seconds), **environ)
    assert (done.returncode, done.stderr) == (37, f"ddpobs: hosts are not compared, because {reason}\n")


@pytest.mark.wide
def test_a_rank_with_a_tenth_of_a_processor_stops_the_launch_before_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with quota_group(100) as group:
        # Torchrun makes one sign of the two of `$$`.
        join = f'[ "$RANK" != 1 ] || echo $BASHPID > {group.folder}/cgroup.procs; exec "$@"'
        rank = ["bash", "-c", join, "bash", sys.executable, script, tmp_path / "rank"]
        launch = (*TORCHRUN, "--nproc-per-node", "3", "--no-python", *rank)
        done = check(*launch, options=("--seconds", "1", "--limit", "1.5", "--disk", str(tmp_path)))
    assert done.returncode == SLOW_HOST, done.stderr
    slow = [line for line in done.stderr.splitlines() if line.startswith("ddpobs: slow host ")]
    assert any(": matrix products slower by " in line and "(rank 1: " in line for line in slow), done.stderr
    assert not list(tmp_path.glob("rank*"))
    assert done.stderr.count("ddpobs: checked") == 1  # A second time after a restart.


@pytest.mark.wide
def test_a_host_with_a_slow_link_is_named_on_all_hosts_and_its_partners_are_not(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    shared = {"MASTER_ADDR": links.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": links.INTERFACE}
    try:
        with links.links(3, "10gbit") as network:
            slow = network.inside(1, ["tc", "qdisc", "change", "dev", links.INTERFACE, "root", "tbf", "rate", "40mbit"])
            subprocess.run([*slow, *links.SHAPE.split()], check=True)
            hosts = []
            for rank in range(3):
                started = command(script, tmp_path / "rank", by=("check-hosts", "--seconds", "1", "--limit", "2"))
                environ = started["env"] | shared | {"RANK": str(rank), "WORLD_SIZE": "3"}
                with (tmp_path / f"log{rank}").open("wb") as log:
                    inside = network.on_own_host(rank, started["args"])
                    hosts.append(subprocess.Popen(inside, env=environ, stdout=log, stderr=log))
            statuses = [host.wait(patience.HANG_S) for host in hosts]
    except links.LinkError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    text = (tmp_path / "log0").read_text()
    assert statuses == [SLOW_HOST] * 3, text
    slow_hosts = {line.split(":")[1].strip() for line in text.splitlines() if line.startswith("ddpobs: slow host ")}
    assert slow_hosts == {"slow host node1"}, text
    assert "slow host node1: exchange slower by " in text
    assert not list(tmp_path.glob("rank*"))
