"""Too early, too short and all well are different sentences."""

from __future__ import annotations

import pytest
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.verdict import verdict_of

from tests.support.analysis.scenario import columns, evidence_of, noiseless


@pytest.mark.parametrize(
    ("is_over", "kind", "text"),
    [
        (False, "too-early", "Too early: 32 steps are needed, 12 are there."),
        (True, "too-short", "Too short to judge: 12 of 32 steps."),
    ],
)
def test_a_run_with_too_few_steps_is_too_early_or_too_short(is_over: bool, kind: str, text: str) -> None:
    evidence = evidence_of(*columns(noiseless({}, steps=12)), world_size=4)
    verdict = verdict_of(evidence, [], 12, is_over=is_over)
    assert (verdict.kind, verdict.text) == (kind, text)


def test_steps_that_cannot_be_compared_are_counted() -> None:
    evidence = evidence_of(*columns(noiseless({}, steps=12)), world_size=4)
    expected = "Not compared: own times of all ranks are known in 12 of 500 steps, 32 are needed."
    assert verdict_of(evidence, [], 500, is_over=True).text == expected


def test_a_balanced_run_has_its_own_times_and_its_communication() -> None:
    evidence = evidence_of(*columns(noiseless({})), world_size=4)
    verdict = verdict_of(evidence, [], 200, is_over=True)
    assert verdict.kind == "well"
    assert verdict.text.startswith("Balanced: own times ")
    assert "% moving data, 0 % waiting for ranks" in verdict.text


def test_a_finding_that_the_account_states_is_no_card() -> None:
    evidence = evidence_of(*columns(noiseless({})), world_size=4)
    loss, slow = (Finding(code, "info", "v", "r", (0, 1)) for code in ("scaling-loss", "straggler"))
    assert verdict_of(evidence, [loss], 200, is_over=True).kind == "well"
    assert verdict_of(evidence, [loss, slow], 200, is_over=True).text == ""
