"""Compilations in mid-run: whose, how often, why, and what they cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import NotJudged
from ddpobs_server.analysis.findings.recompilation import RecompilationFacts, recompilation
from ddpobs_server.analysis.findings.straggler import straggler
from ddpobs_server.analysis.findings.utilisation_swings import utilisation_swings

from ddpobs import wire
from tests.support.analysis.accounts import process
from tests.support.analysis.judged import facts_of, only
from tests.support.analysis.scenario import MS, columns, evidence_of, flat, noiseless, with_columns

COMPILE_MS = 300.0
REASON = "tensor 'x' size mismatch at index 1. expected 18, actual 19"


def compiling(*ranks: int, steps: int = 200, at: slice = slice(20, 180, 10), phase: str = "other") -> Evidence:
    """A run of 75 ms a step in which these of three ranks compile for 300 ms in some steps."""
    own, delays = noiseless({}, steps, 3), np.zeros((steps, 3))
    delays[at, list(ranks)] = COMPILE_MS * MS
    own[:, :, wire.OWN_PHASES.index(phase)] += delays.astype(np.int64)
    rank, known = columns(own)
    fields: dict[str, Any] = {"recompile_place": "train.py:12 forward", "recompile_reason": REASON}
    return evidence_of(rank, with_columns(known, compile_ns=flat(delays)), processes=[process(ranks[0], **fields)])


def test_one_rank_that_compiles_for_new_sizes_is_named_with_function_reason_and_cost() -> None:
    judged = compiling(1)
    finding = only(recompilation(judged))
    assert finding.verdict == "Rank 1 compiles in mid-run, and the other ranks wait"
    assert (finding.severity, finding.ranks, finding.cause) == ("warning", [1], REASON)
    assert "train.py:12 forward" in finding.where
    assert "mark_dynamic" in finding.remedy
    facts = facts_of(RecompilationFacts, finding)
    assert facts.times == {0: 0, 1: 16, 2: 0}
    assert facts.lost_ns == pytest.approx(16 * COMPILE_MS * MS)
    assert facts.share == pytest.approx(16 * 300 / (16 * 300 + 199 * 78), abs=0.01)


@pytest.mark.parametrize("phase", ["forward", "backward", "other"])
def test_a_rank_that_compiles_is_no_straggler_and_its_steps_are_no_swing(phase: str) -> None:
    judged = compiling(1, at=slice(20, 200, 5), phase=phase)
    assert straggler(judged) == []
    assert utilisation_swings(judged) == []


def test_ranks_that_compile_together_leave_none_that_waits() -> None:
    assert only(recompilation(compiling(0, 1, 2))).verdict == "Ranks 0, 1 and 2 compile in mid-run"


def test_compilations_of_the_first_steps_are_no_finding() -> None:
    assert recompilation(compiling(1, at=slice(0, 10))) == []


def test_too_few_steps_are_not_judged() -> None:
    (result,) = recompilation(compiling(1, steps=15, at=slice(11, 14)))
    assert isinstance(result, NotJudged)
