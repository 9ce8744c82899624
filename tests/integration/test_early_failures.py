"""Ranks under `ddpobs run` that raise before they have telemetry, as small processes with a fake collector."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import zstandard

from benchmarks.rig import patience
from ddpobs import wire
from tests.support.integration.collectors import Seen, absent, acknowledge, collector
from tests.support.integration.run_command import command

REPLACED = "import sys; sys.excepthook = lambda *_: None\n"
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', '1 / 0'])\n"


def run(code: str, url: str, spool: Path, **environ: str) -> str:
    """Run code as rank 1 of 4, and return its stderr."""
    arguments = command("-c", code, url=url)
    arguments["env"] |= {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1", "DDPOBS_SPOOL": str(spool)} | environ
    process = subprocess.run(**arguments, capture_output=True, check=False, timeout=patience.HANG_S)
    return str(process.stderr)


def batches(seen: Seen) -> list[wire.Batch]:
    return [wire.decode(zstandard.decompress(body, max_output_size=2**20)) for _, body, _ in seen.puts]


@pytest.mark.parametrize("begin", ["", REPLACED], ids=["at once", "at exit, behind a hook of the script's"])
def test_a_rank_that_raises_before_its_model_is_reported_with_its_error(begin: str, tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        errors = run(f"{begin}import os; os.environ['RANK'] = '2'; import nothing_here", seen.url, tmp_path)
    (batch,) = batches(seen)
    (event,) = batch.events
    assert (batch.run, batch.rank, batch.world_size, event.kind, event.step) == ("r", 1, 4, "failed", 0)
    assert (event.detail["error"], event.detail["stage"]) == ("ModuleNotFoundError", "start")
    assert errors.count(f"ddpobs: rank 1 failed before its model was built: {seen.url}/runs/r\n") == 1
    assert not list(tmp_path.glob("*.batch"))


def test_an_attempt_has_one_id_and_the_next_one_another(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        for rank, restart in ("0", "0"), ("1", "0"), ("1", "1"):
            names = {"RANK": rank, "TORCHELASTIC_RESTART_COUNT": restart, "MASTER_ADDR": "node0"}
            code = "def init_process_group():\n    raise OSError\ninit_process_group()"
            assert "failed in init_process_group" in run(code, seen.url, tmp_path, **names)
    first, second, third = (batch.attempt for batch in batches(seen))
    assert first == second != third


@pytest.mark.parametrize("code", [CHILD, "raise KeyboardInterrupt", "print(1)"])
def test_nothing_is_reported_that_is_no_error_of_the_rank(code: str, tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        assert "ddpobs:" not in run(code, seen.url, tmp_path)
        assert not seen.puts


def test_a_program_below_a_rank_is_not_reported(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        run("1 / 0", seen.url, tmp_path, DDPOBS_RANK_PROCESSES="1:2:job:r")
        assert not seen.puts


def test_a_program_without_a_rank_is_reported_as_the_command(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        run("1 / 0", seen.url, tmp_path, RANK="")
    (batch,) = batches(seen)
    assert batch.events[0].detail["stage"] == "command"


def test_a_report_that_does_not_arrive_waits_in_the_spool(tmp_path: Path) -> None:
    assert "not reported" in run("1 / 0", absent(), tmp_path)
    assert len(list(tmp_path.glob("*.batch"))) == 1
