"""A real rank that compiles anew in mid-run, under `ddpobs run`, with a real collector."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.rig import patience
from benchmarks.rig.training import TORCHRUN
from tests.support.integration.run_command import command
from tests.support.integration.slow_ranks import get

pytestmark = pytest.mark.wide
SCRIPT = Path(__file__).with_name("scripts") / "recompiling.py"


def test_a_rank_that_compiles_in_mid_run_is_named_with_function_and_reason(url: str) -> None:
    arguments = command(*TORCHRUN[1:], SCRIPT, url=url, run="recompiling")
    done = patience.run(arguments["args"], environ=arguments["env"], stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    findings = {finding["code"]: finding for finding in get(url, "recompiling", "/diagnostics")["findings"]}
    found = findings["recompilation"]
    assert (found["ranks"], found["evidence"]["times"]) == ([1], {"0": 0, "1": 7})
    assert found["verdict"] == "Rank 1 compiles in mid-run, and the other rank waits"
    assert found["cause"] == "tensor 'batch' size mismatch at index 0. expected 11, actual 12"
    assert found["evidence"]["function"].startswith("recompiling.py:")
    by_rank = {rank["rank"]: rank["parts_ns"] for rank in get(url, "recompiling", "/account")["attempts"][0]["ranks"]}
    assert by_rank[1]["recompile"] >= 0.9 * found["evidence"]["compile_ns"]["1"]
    assert "recompile" not in by_rank[0]
