"""`ddpobs horovodrun` maps Horovod's command line to torchrun and mpiexec.

`tests/horovod/test_elastic.py` starts ranks with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.rig import patience
from ddpobs.cli import main
from ddpobs.cli.horovodrun import by_mpiexec, by_torchrun, read_hosts


def test_this_host_may_be_named() -> None:
    plain = by_torchrun(["python", "train.py"], 4, "")
    assert by_torchrun(["python", "train.py"], 4, "localhost:4") == plain
    assert plain[0] == "python"


def test_options_become_settings_in_the_environment(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\nenv | grep "^HOROVOD_\\|_SOCKET_IFNAME=" | sort\necho "$@"\n')
    script.chmod(0o755)
    options = ["--fusion-threshold-mb", "2", "--timeline-filename", "t.json", "--autotune", "--network-interface", "lo"]
    options += ["--stall-check-warning-time-seconds", "30", "--reset-limit", "3"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from ddpobs.cli import main; main()",
            "horovodrun",
            "-np",
            "2",
            *options,
            script,
            "a.py",
        ],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=patience.HANG_S,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "GLOO_SOCKET_IFNAME=lo",
        "HOROVOD_AUTOTUNE=1",
        "HOROVOD_FUSION_THRESHOLD=2097152",
        "HOROVOD_STALL_CHECK_TIME_SECONDS=30.0",
        "HOROVOD_TIMELINE=t.json",
        "NCCL_SOCKET_IFNAME=lo",
        "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=3 a.py",
    ]


def test_a_host_file_has_the_form_of_mpis(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# two hosts\na slots=2\n\nb\n")
    assert read_hosts(hosts) == "a:2,b:1"
    hosts.write_text("a slots=many\n")
    with pytest.raises(ValueError, match="line 1: expected `HOST slots=SLOTS`"):
        read_hosts(hosts)


def test_what_is_built_is_listed() -> None:
    done = CliRunner().invoke(main, ["horovodrun", "--check-build"])
    assert "Available Controllers" in done.output
    assert "[X] Gloo" in done.output


def test_mpiexec_gets_the_number_of_ranks_and_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mpiexec", "python"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    mpiexec = str(tmp_path / "mpiexec")
    assert by_mpiexec(["python", "train.py"], 4, "a:2,b:2") == [
        *(mpiexec, "-n", "4", "-hosts", "a:2,b:2", "python", "train.py")
    ]
    (tmp_path / "ompi_info").touch()
    assert by_mpiexec(["./train"], 4, "a:2,b:2", ["--tag-output"], ["HOROVOD_TIMELINE"]) == [
        *(mpiexec, "-n", "4", "--bind-to", "none", "--host", "a:2,b:2", "-x", "HOROVOD_TIMELINE"),
        *("--tag-output", "./train"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-H", "far:2", "python", "train.py"], "not on far:2"),
        (["./train"], "python SCRIPT"),
        (["--mpi", "--gloo", "python", "train.py"], "exclude each other"),
        (["--min-np", "1", "python", "train.py"], "torchrun --nnodes MIN:MAX"),
        ([], "COMMAND"),
    ],
)
def test_a_command_that_cannot_start_is_a_clear_error(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["horovodrun", "-np", "2", *arguments])
    assert done.exit_code == 2
    assert message in done.output
