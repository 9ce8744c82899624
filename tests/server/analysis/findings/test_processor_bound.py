"""All ranks that wait for a processor together, since when, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.other_bound import other_bound
from ddpobs_server.analysis.findings.processor_bound import ProcessorBoundFacts, processor_bound
from ddpobs_server.analysis.findings.straggler import straggler

from ddpobs import wire
from tests.support.analysis.judged import facts_of, only
from tests.support.analysis.scenario import MS, columns, evidence_of, flat, noiseless, with_columns

STEPS, WAIT_MS = 300, 60.0


def waiting(
    *, ranks: int = 2, since: int = 0, slow: tuple[int, ...] | None = None, throttled: float = 0.0, **facts: Any
) -> Evidence:
    """A run whose ranks wait 60 ms a step for a processor, all or those of `slow`, beside 75 ms of work."""
    members = range(ranks) if slow is None else slow
    own, waits = noiseless({}, STEPS, ranks), np.zeros((STEPS, ranks))
    for member in members:
        own[since:, member, wire.OWN_PHASES.index("other")] += round(WAIT_MS * MS)
        waits[since:, member] = WAIT_MS * MS
    rank, steps = columns(own)
    recorded = {"run_delay_ns": flat(waits), "throttled_ns": flat(throttled * waits)}
    recorded["running_ns"] = flat(np.full((STEPS, ranks), 70.0 * MS))
    known: dict[str, Any] = {"hosts": dict.fromkeys(range(ranks), "one"), "world_size": ranks}
    return evidence_of(rank, with_columns(steps, **recorded), **known | facts)


def pulses(ranks: int = 2, idle_ns: int = 0, **machine: Any) -> dict[int, wire.Pulse]:
    code = [wire.CodePlace(phase="other", place="a.py:3", calls="log", looks=40)]
    known: dict[str, Any] = {"host_processors": 8, "allowed": "0-7"}
    state = wire.Machine(**known | machine)
    pulse = wire.Pulse(at_ns=0, phase="other", step=STEPS, machine=state, idle_ns=idle_ns, looks=40, code=code)
    return dict.fromkeys(range(ranks), pulse)


def hello(threads: int, device: str = "cpu") -> wire.Hello:
    settings: dict[str, wire.Scalar] = {"processors": "0-7", "threads": threads}
    return wire.Hello(host="one", pid=1, device=device, backend="gloo", versions={}, settings=settings)


def test_ranks_that_share_one_processor_since_a_step_wait_together_and_none_is_slow_by_itself() -> None:
    judged = waiting(since=100, pulses=pulses(allowed="3"))
    finding = only(processor_bound(judged))
    assert (finding.severity, finding.ranks) == ("critical", [0, 1])
    assert finding.verdict.rpartition(" ")[0] == "All ranks wait for a processor since step"
    assert abs(int(finding.verdict.rpartition(" ")[2]) - 100) <= 4
    assert finding.cause == "ranks 0 and 1 may use processor 3 only, of 8 of the host"
    assert "affinity" in finding.remedy
    assert facts_of(ProcessorBoundFacts, finding).delay_share == pytest.approx(WAIT_MS / (75 + WAIT_MS), abs=0.04)
    assert finding.gain is not None
    assert straggler(judged) == []


@pytest.mark.parametrize(
    ("facts", "cause", "words"),
    [
        ({"throttled": 0.8, "pulses": pulses(quota_permille=1500)}, "quota", "quota of 1.5 processors"),
        ({"pulses": pulses(), "hellos": dict.fromkeys(range(2), hello(8))}, "threads", "16 threads share 8 processors"),
        ({"pulses": pulses(busy_permille=990, process_permille=700)}, "others", "1.4 of 7.9 processors"),
        ({"pulses": pulses(idle_ns=10_000 * MS, busy_permille=990, process_permille=1)}, "not-known", "not known"),
        ({"pulses": pulses(busy_permille=990, process_permille=30)}, "not-known", "not known"),
        ({"pulses": pulses(), "hellos": dict.fromkeys(range(2), hello(4))}, "not-known", "not known"),
        ({}, "not-known", "not known"),
    ],
)
def test_the_cause_is_what_was_seen(facts: dict[str, Any], cause: str, words: str) -> None:
    finding = only(processor_bound(waiting(**facts)))
    assert facts_of(ProcessorBoundFacts, finding).cause == cause
    assert words in finding.cause
    assert finding.verdict == "All ranks wait for a processor"


def test_all_ranks_of_one_host_of_two_are_named() -> None:
    hosts = {0: "one", 1: "one", 2: "two", 3: "two"}
    finding = only(processor_bound(waiting(ranks=4, slow=(0, 1), hosts=hosts)))
    assert (finding.ranks, finding.verdict) == ([0, 1], "2 ranks of one host wait for a processor")
    assert finding.where == "host one"


def test_a_single_rank_that_waits_is_a_straggler_and_no_shortage() -> None:
    judged = waiting(ranks=4, slow=(2,))
    assert processor_bound(judged) == []
    assert [f.ranks for f in straggler(judged) if isinstance(f, Finding)] == [[2]]


def test_waits_that_are_over_have_their_steps_and_no_gain() -> None:
    judged = waiting()
    delay_ns = judged.steps.run_delay_ns.copy()
    delay_ns[2 * 150 :] = 0
    steps = with_columns(judged.steps, run_delay_ns=delay_ns)
    finding = only(processor_bound(evidence_of(judged.rank, steps)))
    assert finding.gain is None
    assert abs(finding.steps[1] - 150) <= 4


def test_short_waits_and_a_system_without_counters_are_no_finding() -> None:
    judged = waiting()
    few = with_columns(judged.steps, run_delay_ns=judged.steps.run_delay_ns // 4)
    unknown = with_columns(judged.steps, run_delay_ns=np.full_like(judged.steps.run_delay_ns, wire.UNKNOWN))
    for steps in (few, unknown):
        assert processor_bound(evidence_of(judged.rank, steps)) == []


def test_too_few_steps_are_not_judged() -> None:
    judged = waiting()
    rows = judged.steps.step < 10
    short = evidence_of(judged.rank[rows], judged.steps.select(rows))
    assert [type(result) for result in processor_bound(short)] == [NotJudged]


def test_waits_beside_a_device_may_cost_nothing() -> None:
    finding = only(processor_bound(waiting(hellos=dict.fromkeys(range(2), hello(1, "NVIDIA H100")))))
    assert (finding.severity, finding.gain) == ("info", None)


def test_time_without_a_processor_is_no_gain_of_the_line_that_had_to_wait() -> None:
    judged = waiting(pulses=pulses())
    free = with_columns(judged.steps, run_delay_ns=np.zeros_like(judged.steps.run_delay_ns))
    before, after = (only(other_bound(replace(judged, steps=steps))) for steps in (free, judged.steps))
    assert before.gain is not None
    assert before.gain.step_ns == pytest.approx((WAIT_MS + 2) * MS, rel=0.05)
    assert after.gain is None or after.gain.step_ns < 5 * MS
    assert "wait" in after.cause
