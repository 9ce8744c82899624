"""Causes of a slow input and places of other time, from columns and pulses with a given answer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.input_bound import InputBoundFacts, input_bound
from ddpobs_server.analysis.findings.other_bound import other_bound

from ddpobs import wire
from tests.support.analysis.judged import facts_of
from tests.support.analysis.scenario import columns, evidence_of, noiseless

facts = partial(facts_of, InputBoundFacts)

MS = 1_000_000
LINE = wire.CodePlace(phase="data", place="train.py:9", looks=20)


def pulse(*code: wire.CodePlace, **counts: Any) -> wire.Pulse:
    return wire.Pulse(
        at_ns=1,
        phase="data",
        step=1,
        idle_ns=0,
        activity="code",
        code=list(code),
        input=wire.Input(**counts) if counts else None,
    )


def evidence(phase: str, ms: float, of_rank: wire.Pulse | None, ranks: int = 2) -> Evidence:
    run = evidence_of(*columns(noiseless(dict.fromkeys(range(ranks), (phase, ms)), ranks=ranks)))
    return replace(run, pulses={rank: of_rank for rank in range(ranks) if of_rank}, world_size=ranks)


def input_finding(*code: wire.CodePlace, **counts: Any) -> Finding:
    (finding,) = input_bound(evidence("data", 95, pulse(*code, **counts)))
    assert isinstance(finding, Finding)
    assert finding.verdict == "Waiting for data takes 58 % of the steps' time"
    return finding


WORKERS = {"iterators": 1, "creating_ns": MS, "batches": 100, "fetching_ns": 10_000 * MS, "cpus": 32}


@pytest.mark.parametrize(
    ("counts", "cause", "gain_ms"),
    [
        ({"workers": 2, "awaited_ns": [5, 5], "alone_ns": [0, 0]}, "few-workers", (100, 100)),
        ({"workers": 0}, "few-workers", (100, 100)),
        ({"workers": 0, "collating_ns": 9_000 * MS}, "slow-collate", (73, 90)),
        ({"workers": 2, "awaited_ns": [0, 8], "alone_ns": [0, 8_000 * MS]}, "slow-worker", (40, 80)),
        ({"workers": 2, "iterators": 100, "creating_ns": 10_000 * MS}, "new-iterators", (50, 100)),
        ({"workers": 2, "iterators": 40, "creating_ns": 10_000 * MS}, "new-iterators", (50, 100)),
        ({"workers": 0, "iterators": 100}, "few-workers", (100, 100)),
        ({"workers": 2, "iterators": 10, "first_ns": 9_000 * MS}, "new-iterators", (80, 89)),
        ({"workers": 2, "iterators": 10, "first_ns": 1_000 * MS}, "few-workers", (100, 100)),
    ],
)
def test_each_cause_has_its_bounds_of_the_gain(
    counts: dict[str, Any], cause: str, gain_ms: tuple[float, float]
) -> None:
    finding = input_finding(**(WORKERS | counts))
    assert facts(finding).cause == cause
    assert finding.gain is not None
    least, most = (finding.gain.step_ns * (1 + sign * finding.gain.error_ratio) / MS for sign in (-1, 1))
    assert (least, most) == pytest.approx(gain_ms, rel=0.03)


def test_the_number_of_workers_follows_from_the_rest_of_the_step() -> None:
    # Two workers prepare a batch in 2 x 173 ms; the rest of a step takes 73 ms.
    finding = input_finding(**(WORKERS | {"workers": 2}))
    assert facts(finding).needed_workers == 5
    assert "num_workers=5" in finding.remedy
    assert "processors" not in finding.remedy


def test_few_processors_limit_the_predicted_gain() -> None:
    finding = input_finding(**(WORKERS | {"workers": 2, "cpus": 4}))
    assert "2 processors" in finding.remedy
    assert finding.gain is not None
    assert finding.gain.error_ratio == 1.0


def test_no_more_workers_are_advised_than_a_rank_has_processors() -> None:
    some = input_finding(**(WORKERS | {"workers": 2, "cpus": 6}))  # Two ranks share them.
    assert some.remedy.startswith("Set num_workers=3. Make samples or collate_fn cheaper, too")
    assert "5 would keep up" in some.remedy
    none = input_finding(**(WORKERS | {"workers": 8, "cpus": 6}))
    assert none.remedy.startswith("Make samples or collate_fn cheaper")
    assert "num_workers" not in none.remedy


def test_workers_that_start_in_each_epoch_cost_these_seconds_and_are_not_cured_by_more() -> None:
    counts = WORKERS | {"workers": 2, "iterators": 10, "first_ns": 9_000 * MS}
    finding = input_finding(**counts)
    assert finding.cause.endswith("starts its workers anew: 0.89 s each time")
    assert "persistent_workers=True" in finding.remedy
    assert "num_workers" not in finding.remedy
    outliving = input_finding(**counts, persistent=True)
    assert facts(outliving).cause == "new-iterators"
    assert "persistent_workers" not in outliving.remedy


def test_a_new_iterator_in_each_step_is_not_cured_by_more_workers() -> None:
    finding = input_finding(**(WORKERS | {"workers": 1, "iterators": 100}))
    assert "one iterator" in finding.remedy
    assert "num_workers" not in finding.remedy


def test_an_own_loader_is_stated_with_its_place() -> None:
    finding = input_finding(place_with(iterates=True, calls="sleep"))
    assert facts(finding).cause == "own-loader"
    assert "train.py:9 (sleep)" in finding.title
    assert "pinned" not in finding.remedy
    assert "pinned" in input_finding(place_with(iterates=True, calls="to")).remedy


def place_with(**fields: Any) -> wire.CodePlace:
    return wire.CodePlace(**{name: getattr(LINE, name) for name in LINE.__struct_fields__} | fields)


@pytest.mark.parametrize("of_rank", [None, pulse(place_with(iterates=True, looks=3))])
def test_without_counts_and_looks_the_cause_is_not_known(of_rank: wire.Pulse | None) -> None:
    finding, missing = input_bound(evidence("data", 95, of_rank))
    assert isinstance(finding, Finding)
    assert isinstance(missing, NotJudged)
    assert facts(finding).cause == "unknown"
    assert finding.gain is None


def test_waiting_for_the_batches_of_another_rank_is_not_compared_with_data() -> None:
    own = noiseless({0: ("data", 60), 1: ("data", 60)}, ranks=2)
    own[::2, 0, 0] += 200 * MS
    own[1::2, 1, 0] += 200 * MS
    assert isinstance(input_bound(evidence_of(*columns(own)))[0], Finding)


def test_copies_on_every_rank_are_input_bound_and_not_other_bound() -> None:
    copies = place_with(phase="other", calls="to")
    run = evidence("other", 60, pulse(copies))
    (finding,) = input_bound(run)
    assert isinstance(finding, Finding)
    assert (facts(finding).cause, finding.phase, finding.gain) == ("copy", "other", None)
    assert "non_blocking" in finding.remedy
    assert other_bound(run) == []


def test_other_time_on_every_rank_has_its_place_and_a_gain_that_the_looks_make_sure_of() -> None:
    places = [place_with(phase="other", place=f"log.py:{line}", looks=looks) for line, looks in ((7, 30), (8, 10))]
    run = evidence("other", 60, pulse(*places))
    (finding,) = other_bound(run)
    assert isinstance(finding, Finding)
    assert finding.cause == "log.py:7 takes 75 % of that time, by 80 looks"
    assert finding.gain is not None
    least_share = 0.6628  # Wilson's lower bound for 60 of 80.
    assert finding.gain.step_ns == pytest.approx(least_share * 62 * MS, rel=0.01)
    assert finding.gain.error_ratio == pytest.approx((0.25 / 0.75 / 80) ** 0.5, rel=0.01)
    assert input_bound(run) == []


def test_other_time_without_a_place_is_no_warning() -> None:
    without_text = pulse(place_with(phase="other", place=""))
    for of_rank, reason in ((None, "only 0 looks"), (without_text, "DDPOBS_TRACEBACK=0")):
        (finding,) = other_bound(evidence("other", 60, of_rank))
        assert isinstance(finding, Finding)
        assert (finding.severity, finding.gain) == ("info", None)
        assert reason in finding.cause


def test_other_time_on_some_ranks_or_below_a_fifth_is_no_finding() -> None:
    assert other_bound(evidence("other", 10, None)) == []
    own = noiseless({0: ("other", 60)}, ranks=2)
    assert other_bound(evidence_of(*columns(own))) == []


def test_too_few_steps_are_not_judged() -> None:
    run = evidence_of(*columns(noiseless({}, steps=19, ranks=2)))
    assert isinstance(other_bound(run)[0], NotJudged)
