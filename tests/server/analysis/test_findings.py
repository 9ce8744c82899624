"""The findings other than the straggler: when each appears, when it does not, and when it is not judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged, by_severity, severity_of
from ddpobs_server.analysis.findings.input_bound import InputBoundFacts, input_bound
from ddpobs_server.analysis.findings.misconfiguration import epoch_not_set
from ddpobs_server.analysis.findings.telemetry_health import telemetry_loss
from ddpobs_server.analysis.findings.unused_parameters import (
    LATEST_SETS,
    UnusedParametersFacts,
    find_unused_needless,
    unused_parameters,
)

from ddpobs import wire
from tests.support.analysis.judged import facts_of, findings_in
from tests.support.analysis.scenario import BASE_MS, MS, columns, evidence_of, own_times

unused_facts = partial(facts_of, UnusedParametersFacts)


def evidence(extra_ms: Sequence[Mapping[str, float]], moving_ms: float = 3.0, steps: int = 40) -> Evidence:
    """Noiseless steps of one rank per entry: base own times plus the extra ones."""
    own = np.array([[BASE_MS[phase] + extra.get(phase, 0) for phase in wire.OWN_PHASES] for extra in extra_ms])
    return evidence_of(*columns((np.tile(own, (steps, 1, 1)) * MS).astype(np.int64), moving_ms))


def only(judgement: Judgement) -> Finding:
    """Return the only finding, without the questions that were not judged."""
    (finding,) = findings_in(judgement)
    return finding


def is_not_judged(judgement: Judgement) -> bool:
    return [type(result) for result in judgement] == [NotJudged]


def test_waiting_for_data_on_every_rank_is_input_bound() -> None:
    # 95 ms of data in a step of 168 ms.
    finding = only(input_bound(evidence([{"data": 90}, {"data": 90}])))
    assert finding.phase == "data"
    assert facts_of(InputBoundFacts, finding).shares["data"] == pytest.approx(95 / 168, abs=1e-4)


@pytest.mark.parametrize("steps", [20, 30, 200])
def test_one_slow_first_fetch_is_not_input_bound(steps: int) -> None:
    own = own_times(steps, 4, seed=0)
    own[0, :, 0] += 8_000 * MS
    rank, rows = columns(own)
    assert input_bound(replace(evidence([{}]), rank=rank, steps=rows)) == []


def test_workers_that_deliver_in_bursts_are_input_bound_although_most_steps_do_not_wait() -> None:
    own = own_times(40, 4, seed=0)
    own[::4, :, 0] += 400 * MS
    rank, rows = columns(own)
    finding = only(input_bound(replace(evidence([{}]), rank=rank, steps=rows)))
    assert facts_of(InputBoundFacts, finding).shares["data"] == pytest.approx(0.5, abs=0.1)
    assert "of the steps' time" in finding.title


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_rank_that_waits_for_data_is_a_straggler_and_not_input_bound(ranks: int) -> None:
    assert input_bound(evidence([{"data": 200}] + [{}] * (ranks - 1))) == []


def test_data_above_30_percent_that_is_not_the_largest_phase_is_not_input_bound() -> None:
    assert input_bound(evidence([{"data": 60, "backward": 40}] * 2)) == []


def test_too_few_steps_are_not_judged() -> None:
    (result,) = input_bound(evidence([{}, {}], steps=19))
    assert isinstance(result, NotJudged)
    assert "20" in str(result)


def unused_set(rank: int, step: int, locally: list[str], globally: list[str] | None = None) -> tuple[int, wire.Unused]:
    return rank, wire.Unused(step=step, module=0, locally=locally, globally=locally if globally is None else globally)


def test_a_parameter_that_no_rank_uses_is_named_and_is_a_warning() -> None:
    finding = only(
        unused_parameters(
            replace(evidence([{}, {}]), unused=[unused_set(0, 3, ["a", "b"]), unused_set(1, 3, ["a", "b"])])
        )
    )
    assert (finding.severity, finding.parameters, finding.ranks) == ("warning", ["a", "b"], [0, 1])
    assert finding.steps == (3, 39)
    assert unused_facts(finding).globally == ["a", "b"]
    assert "on every rank" in finding.cause


def test_a_parameter_that_some_ranks_skip_is_named_with_these_ranks() -> None:
    finding = only(unused_parameters(replace(evidence([{}, {}]), unused=[unused_set(1, 5, ["branch.weight"], [])])))
    assert (finding.severity, finding.parameters, finding.ranks) == ("info", ["branch.weight"], [1])
    assert "rank 1" in finding.title


def test_a_set_that_became_empty_again_is_no_longer_unused() -> None:
    assert unused_parameters(replace(evidence([{}, {}]), unused=[unused_set(0, 1, ["a"]), unused_set(0, 2, [])])) == []


def alternating(steps: int, turn: int, *sets: list[str], until: int | None = None) -> Evidence:
    """Two ranks with another unused set after each turn."""
    turns = [(step, sets[step // turn % len(sets)]) for step in range(0, steps if until is None else until, turn)]
    unused = [unused_set(rank, step, names) for rank in range(2) for step, names in turns]
    return replace(evidence([{}, {}], steps=steps), unused=unused)


@pytest.mark.parametrize("sets", [(["a"], ["b"]), (["a"], []), ([], ["a"]), (["a", "b"], ["b", "c"], ["a", "c"])])
@pytest.mark.parametrize("turn", [1, 100])
def test_a_parameter_trained_in_some_steps_is_not_to_be_frozen(sets: tuple[list[str], ...], turn: int) -> None:
    finding = only(unused_parameters(alternating(6 * turn + turn // 2 + 1, turn, *sets)))
    assert (finding.severity, unused_facts(finding).globally) == ("info", [])
    assert "in some steps" in finding.title
    assert "find_unused_parameters=True is needed" in finding.remedy
    assert finding.parameters == unused_facts(finding).sometimes == sorted(set().union(*sets))


def test_parameters_that_no_step_uses_are_separated_from_parameters_that_some_steps_use() -> None:
    finding = only(unused_parameters(alternating(201, 1, ["a", "never"], ["b", "never"])))
    assert (finding.severity, unused_facts(finding).globally) == ("warning", ["never"])
    assert unused_facts(finding).sometimes == ["a", "b"]


@pytest.mark.parametrize("per_step", [1, 4])
def test_of_many_parameters_that_take_turns_none_is_to_be_frozen(per_step: int) -> None:
    """Heads in turn, or a few randomly drawn experts per step: the latest sets name most of them."""
    heads = [f"head{number:02}" for number in range(48)]
    random = np.random.default_rng(0)
    used = [{heads[step % 48]} if per_step == 1 else set(random.choice(heads, per_step)) for step in range(200)]
    sets = [(step, sorted(set(heads) - trained)) for step, trained in enumerate(used)][-LATEST_SETS:]
    unused = [unused_set(rank, step, names) for rank in range(2) for step, names in sets]
    finding = only(unused_parameters(replace(evidence([{}, {}], steps=200), unused=unused)))
    assert (finding.severity, unused_facts(finding).globally, unused_facts(finding).sometimes) == ("info", [], heads)
    assert "in some steps" in finding.title
    assert "find_unused_parameters=True is needed" in finding.remedy


def test_a_parameter_frozen_only_in_a_warm_up_is_no_finding() -> None:
    unused = [unused_set(rank, step, names) for rank in range(2) for step, names in ((0, ["head"]), (1000, []))]
    assert unused_parameters(replace(evidence([{}, {}], steps=1100), unused=unused)) == []


def test_parameters_that_every_rank_skips_in_some_steps_are_reported_without_rank_numbers() -> None:
    finding = only(unused_parameters(alternating(20, 1, ["a"], ["b"])))
    assert "on every rank" in finding.cause
    assert "in some steps" in finding.verdict


def test_a_set_that_changed_in_the_first_steps_and_then_stayed_is_unused() -> None:
    finding = only(unused_parameters(alternating(40, 1, ["a", "b"], ["a"], [], until=8)))
    assert (finding.severity, finding.parameters, unused_facts(finding).sometimes) == ("warning", ["a"], [])


def test_a_set_older_than_the_latest_is_not_taken_as_valid_until_them() -> None:
    # The store returns the last empty set, however old it is.
    sets = [(5, []), *((192 + turn, ["a", "b"][: 1 + turn % 2]) for turn in range(LATEST_SETS))]
    unused = [unused_set(rank, step, names) for rank in range(2) for step, names in sets]
    finding = only(unused_parameters(replace(evidence([{}, {}], steps=200), unused=unused)))
    assert (finding.severity, unused_facts(finding).globally, unused_facts(finding).sometimes) == (
        "warning",
        ["a"],
        ["b"],
    )


def test_without_records_no_parameter_is_unused() -> None:
    assert unused_parameters(evidence([{}, {}])) == []


def flagged(enabled: bool = True, steps: int = 40) -> Evidence:
    return replace(evidence([{}, {}], steps=steps), settings={"find_unused_parameters": enabled})


def test_the_flag_is_needless_if_no_parameter_was_ever_unused() -> None:
    assert only(find_unused_needless(flagged())).severity == "info"


def test_the_flag_is_needed_if_a_parameter_was_unused_once() -> None:
    used_again = replace(flagged(), unused=[unused_set(0, 1, ["a"]), unused_set(0, 2, [])])
    assert find_unused_needless(used_again) == []


def test_no_flag_is_not_needless_and_few_steps_are_not_judged() -> None:
    assert find_unused_needless(flagged(enabled=False)) == []
    assert is_not_judged(find_unused_needless(flagged(steps=19)))


def test_the_flag_is_not_judged_if_records_were_dropped() -> None:
    assert is_not_judged(find_unused_needless(replace(flagged(), dropped={0: 5}, emitted={0: 100})))


@pytest.mark.parametrize("unknown", [{"has_gaps": True}, {"absences": {"silent": [2]}}])
def test_the_flag_is_not_judged_if_records_may_be_missing(unknown: dict[str, Any]) -> None:
    assert is_not_judged(find_unused_needless(replace(flagged(), **unknown)))


def test_dropped_records_are_always_a_finding() -> None:
    lossy = replace(evidence([{}, {}], steps=1), emitted={0: 1000, 1: 1000}, dropped={0: 0, 1: 3})
    finding = only(telemetry_loss(lossy))
    assert (finding.severity, finding.ranks) == ("info", [1])
    assert "3 of 2000" in finding.title
    many = only(telemetry_loss(replace(lossy, dropped={0: 0, 1: 30})))
    assert many.severity == "warning"


def test_batches_that_never_arrived_are_a_finding() -> None:
    some = replace(evidence([{}, {}]), missing_batches={0: 2, 1: 0})
    few, many = (only(telemetry_loss(replace(some, sent_batches=batches))) for batches in (200, 199))
    assert (few.ranks, few.severity, many.severity) == ([0], "info", "warning")


def test_no_loss_is_no_finding() -> None:
    assert telemetry_loss(replace(evidence([{}, {}]), emitted={0: 9}, dropped={0: 0}, missing_batches={0: 0})) == []


def test_the_most_severe_finding_comes_first() -> None:
    findings = [
        Finding(code=code, severity=severity, verdict="", remedy="", steps=(0, 0))  # type: ignore[arg-type]
        for code, severity in (("a", "info"), ("b", "warning"), ("c", "critical"))
    ]
    assert [f.code for f in by_severity(findings)] == ["c", "b", "a"]


def test_severity_steps_at_a_tenth_and_a_quarter() -> None:
    assert [severity_of(share) for share in (0.09, 0.1, 0.24, 0.25)] == ["info", "warning", "warning", "critical"]


def event(step: int, kind: str = "sampler_without_set_epoch") -> wire.Event:
    detail: dict[str, wire.Scalar] = {"sampler": "DistributedSampler", "dataset": "Pictures", "epoch": 0}
    return wire.Event(kind=kind, at_ns=0, step=step, detail=detail)


def test_a_sampler_that_stays_at_one_epoch_is_one_finding_with_all_its_ranks() -> None:
    records = [(1, event(12)), (0, event(10)), (0, event(3, "buckets_rebuilt"))]
    finding = only(epoch_not_set(replace(evidence([{}, {}]), events=records)))
    assert (finding.severity, finding.ranks, finding.steps) == ("warning", [0, 1], (10, 39))
    assert "DistributedSampler of Pictures stays at epoch 0" in finding.title
    assert "set_epoch" in finding.remedy


def test_other_events_are_no_epoch_finding() -> None:
    assert epoch_not_set(replace(evidence([{}]), events=[(0, event(3, "goodbye"))])) == []


def test_an_event_of_another_sender_without_detail_is_still_a_finding() -> None:
    records = [(0, wire.Event(kind="sampler_without_set_epoch", at_ns=0, step=10**6))]
    assert only(epoch_not_set(replace(evidence([{}]), events=records))).steps == (10**6, 10**6)
