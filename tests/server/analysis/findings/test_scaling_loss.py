"""Finding `scaling-loss`: efficiency against the run's own computation, and its parts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from ddpobs_server.analysis.account.run_account import Launch, account_of
from ddpobs_server.analysis.account.summary import account_summary
from ddpobs_server.analysis.finding import NotJudged
from ddpobs_server.analysis.findings.scaling_loss import ScalingLossFacts, scaling_loss

from tests.support.analysis.accounts import S, phases, process
from tests.support.analysis.judged import facts_of, only
from tests.support.analysis.link_scenario import Run

facts = partial(facts_of, ScalingLossFacts)

MB = 10**6


def test_the_parts_of_the_loss_add_up_to_the_step() -> None:
    # 30 ms of computation; three of four ranks wait 20 ms for the last; 8.1 ms move.
    late = np.zeros((60, 4))
    late[:, 3] = 20.0
    finding = only(scaling_loss(Run([MB], [20.0], ranks=4, late_ms=late).evidence()))
    parts = {
        name: getattr(finding.evidence, name) / 1e6 for name in ("step_ns", "ideal_step_ns", "waiting_ns", "moving_ns")
    }
    assert parts == pytest.approx({"step_ns": 58.1, "ideal_step_ns": 35, "waiting_ns": 15, "moving_ns": 8.1}, rel=0.01)
    assert facts(finding).efficiency == pytest.approx(35 / 58.1, rel=0.01)
    assert facts(finding).slowdown == pytest.approx(58.1 / 35, rel=0.01)
    assert finding.verdict == "4 ranks do the work of 2.4"
    assert finding.measure == "40 % of the steps' time is lost"
    assert finding.cause == "26 % of the time they wait for each other, 14 % they move data"


def test_it_states_the_whole_run_as_its_account_does() -> None:
    of_ranks = [
        process(0, phases_ns=phases(backward=60), steps=10),
        process(1, phases_ns=phases(backward=20, exposed_comm=40), steps=10),
    ]
    account = account_of([Launch("a", 0, 2, of_ranks, moving_ns={0: 0.0, 1: 1.0})])
    finding = only(scaling_loss(Run([MB // 2], [20.0]).evidence(account=account)))
    assert finding.cause == "33 % of the time they wait for each other"
    assert finding.verdict in account_summary(account)
    assert finding.cause in account_summary(account)
    assert (facts(finding).waiting_ns, facts(finding).moving_ns, facts(finding).steps_used) == (2 * S, 0, 10)


def test_it_only_sums_up_and_is_never_more_than_information() -> None:
    finding = only(scaling_loss(Run([50 * MB], [1.0]).evidence()))
    assert (finding.severity, finding.gain) == ("info", None)


def test_a_run_that_scales_is_no_finding() -> None:
    assert scaling_loss(Run([MB // 2], [20.0]).evidence()) == []


def test_one_rank_has_nothing_to_scale() -> None:
    assert scaling_loss(Run([50 * MB], [1.0], ranks=1).evidence()) == []


def test_long_steps_do_not_decide() -> None:
    late = np.zeros((60, 2))
    late[30, 1] = 60_000.0
    assert scaling_loss(Run([MB // 2], [20.0], late_ms=late).evidence()) == []


@pytest.mark.parametrize(
    ("run", "facts", "reason"),
    [
        (Run([50 * MB], [1.0], steps=19), {}, "fewer than 20 steps"),
        (Run([50 * MB], [1.0]), {"absences": {"silent": [2]}}, "all ranks"),
        (Run([50 * MB], [1.0]), {"separate_groups_reason": "DDP over 2 of 4 ranks"}, "2 of 4"),
    ],
)
def test_without_the_evidence_nothing_is_judged(run: Run, facts: dict[str, object], reason: str) -> None:
    (result,) = scaling_loss(run.evidence(**facts))
    assert isinstance(result, NotJudged)
    assert reason in str(result)
