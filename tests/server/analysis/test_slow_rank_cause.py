"""A slow rank's finding states the cause that its counters show, with its share, or the reason why it is not known."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.findings.straggler import straggler
from ddpobs_server.analysis.slow_ranks.facts import SlowRankFacts

from ddpobs import wire
from tests.support.analysis.judged import facts_of, findings_in, only
from tests.support.analysis.scenario import (
    BASE_MS,
    MS,
    Slow,
    columns,
    evidence_of,
    flat,
    noiseless,
    own_times,
    with_columns,
)

facts = partial(facts_of, SlowRankFacts)

STEPS, DELAY_MS = 200, 40
BACKWARD = np.array([phase == "backward" for phase in wire.OWN_PHASES])
MS_COLUMNS = ("running_ns", "run_delay_ns", "throttled_ns", "collecting_ns")


def judged(
    ranks: int = 4, share: float = 1.0, unknown: tuple[str, ...] = (), usual_ms: float = 0.1, **rank_1: float
) -> Finding:
    """Judge a run whose rank 1 is 40 ms late in backward.

    Args:
        ranks: Number of ranks.
        share: Share of the steps in which it is late.
        unknown: Columns that are not recorded.
        usual_ms: Time of every rank in the run queue.
        **rank_1: What rank 1 counts more than the others in each late step: milliseconds, or events.
    """
    random = np.random.default_rng(0)
    plain = noiseless({}, STEPS, ranks) * random.normal(1, 0.02, (STEPS, ranks, 1))
    late = np.zeros((STEPS, ranks), bool)
    late[:, 1] = random.random(STEPS) < share
    own = (plain + DELAY_MS * MS * late[:, :, None] * BACKWARD).astype(np.int64)
    rank, steps = columns(own)
    changed: dict[str, Any] = {
        "running_ns": plain.sum(axis=2).astype(np.int64),
        "run_delay_ns": np.full(late.shape, int(usual_ms * MS)),
    }
    for name, more in rank_1.items():
        unit = MS if name in MS_COLUMNS else 1
        changed[name] = changed.get(name, np.zeros(late.shape, np.int64)) + (late * more * unit).astype(np.int64)
    changed = {name: flat(values) for name, values in changed.items()}
    changed |= dict.fromkeys(unknown, np.full(len(rank), wire.UNKNOWN))
    pulses = {number: pulse(1900) for number in range(ranks)}
    return only(straggler(evidence_of(rank, with_columns(steps, **changed), pulses=pulses)))


def cause_ns(finding: Finding) -> dict[str, int]:
    by_cause = facts(finding).cause_ns
    assert by_cause is not None
    return by_cause


def pulse(clock_mhz: int, slowdowns: list[str] | None = None) -> wire.Pulse:
    machine = wire.Machine(device_clock_mhz=clock_mhz, device_slowdowns=slowdowns or [])
    return wire.Pulse(at_ns=0, phase="backward", step=1, machine=machine)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize(
    ("cause", "rank_1", "words", "remedy"),
    [
        ("preempted", {"run_delay_ns": 38}, "preempted by other processes", "processors of its own"),
        ("throttled", {"run_delay_ns": 39, "throttled_ns": 38}, "throttled by the processor quota", "cpu.max"),
        ("paging", {"major_faults": 300}, "paging", "more memory"),
        ("collecting-garbage", {"running_ns": 40, "collecting_ns": 37, "collections": 1}, "garbage", "gc.freeze"),
        ("own-work", {"running_ns": 40}, "more work of its own", "sizes of its inputs"),
        ("own-work", {}, "its own code waits", "py-spy dump"),
    ],
)
def test_the_cause_is_stated_with_its_share_and_its_remedy(
    cause: str, rank_1: dict[str, Any], words: str, remedy: str, *, share: float, ranks: int
) -> None:
    finding = judged(ranks, share, **rank_1)
    assert (finding.ranks, facts(finding).cause) == ([1], cause)
    share_of_cause = facts(finding).cause_share
    assert share_of_cause is not None
    assert 0.85 <= share_of_cause <= 1
    assert words in finding.cause
    assert remedy in finding.remedy
    assert sum(cause_ns(finding).values()) == pytest.approx(DELAY_MS * MS, rel=0.1)


def test_the_largest_of_several_causes_is_stated_and_the_others_have_their_parts() -> None:
    finding = judged(run_delay_ns=22, running_ns=18, collecting_ns=12)
    parts_ms = {name: ns / MS for name, ns in cause_ns(finding).items()}
    assert facts(finding).cause == "preempted"
    assert parts_ms["preempted"] == pytest.approx(22, rel=0.1)
    assert parts_ms["collecting-garbage"] == pytest.approx(12, rel=0.1)
    assert parts_ms["own-work"] == pytest.approx(6, abs=3)


def test_throttling_summed_over_many_processors_does_not_hide_another_cause() -> None:
    finding = judged(run_delay_ns=8, throttled_ns=200, running_ns=32, collecting_ns=30)
    assert facts(finding).cause == "collecting-garbage"
    assert cause_ns(finding)["throttled"] == pytest.approx(8 * MS, rel=0.05)


def test_run_delay_of_all_ranks_alike_is_no_cause() -> None:
    finding = judged(running_ns=40)
    assert cause_ns(finding)["preempted"] < MS


def test_more_work_on_a_busy_host_is_not_taken_for_preemption() -> None:
    plain_ms = sum(BASE_MS.values())
    finding = judged(usual_ms=2 * plain_ms, running_ns=14, run_delay_ns=26)
    assert facts(finding).cause == "own-work"
    finding = judged(usual_ms=2 * plain_ms, run_delay_ns=38)
    assert facts(finding).cause == "preempted"


def test_a_few_page_faults_do_not_explain_a_long_wait() -> None:
    finding = judged(major_faults=0.4)
    assert facts(finding).cause == "own-work"


@pytest.mark.parametrize(
    ("absent", "words"), [("running_ns", "the processor time"), ("run_delay_ns", "the wait for a processor")]
)
def test_without_the_threads_schedule_the_cause_is_not_known_and_the_finding_says_so(absent: str, words: str) -> None:
    finding = judged(unknown=(absent,))
    assert facts(finding).cause is None
    assert words in str(facts(finding).cause_unknown)
    assert finding.cause.startswith(f"not known, because {words} of rank 1")


def test_counters_that_are_not_recorded_are_named() -> None:
    finding = judged(unknown=("throttled_ns",), running_ns=40)
    assert facts(finding).not_recorded == ["throttled_ns"]
    assert "throttled_ns not recorded" in finding.cause


def test_a_device_with_a_lowered_clock_is_the_cause_that_no_counter_shows() -> None:
    own = own_times(STEPS, 4, 0, (Slow(1, "backward", DELAY_MS),))
    rank, steps = columns(own)
    steps = with_columns(steps, running_ns=np.full(len(rank), MS))
    pulses = {number: pulse(1900) for number in range(4)} | {1: pulse(1100, ["hw_thermal"])}
    finding = only(straggler(evidence_of(rank, steps, pulses=pulses)))
    assert (facts(finding).cause, facts(finding).cause_share) == ("throttled", None)
    assert "1100 MHz (hw_thermal), the others' 1900 MHz" in finding.cause
    assert "cooling" in finding.remedy


def with_threads(running: bool, **threads: dict[str, int]) -> Finding:
    """Judge rank 1, whose training thread waits or runs; threads are those of each rank."""
    own = own_times(STEPS, 2, 0, (Slow(1, "backward", DELAY_MS),))
    rank, steps = columns(own)
    running_ns = flat(own.sum(axis=2)) if running else np.full(len(rank), 30 * MS)
    steps = with_columns(steps, running_ns=running_ns, run_delay_ns=np.zeros(len(rank), np.int64))
    machines = {int(name[1:]): wire.Machine(threads=used) for name, used in threads.items()}
    pulses = {of: wire.Pulse(at_ns=0, phase="backward", step=1, machine=machine) for of, machine in machines.items()}
    return only(straggler(evidence_of(rank, steps, pulses=pulses)))


def test_a_thread_that_runs_while_the_training_thread_waits_is_named() -> None:
    finding = with_threads(False, r0={}, r1={"saver": 600, "log": 90})
    assert facts(finding).thread == "saver"
    assert finding.cause.startswith("its thread saver runs for 60 % of the time")
    assert "a process of its own" in finding.remedy


@pytest.mark.parametrize(
    ("running", "threads"),
    [
        pytest.param(True, {"r0": {}, "r1": {"saver": 600}}, id="the training thread runs itself"),
        pytest.param(False, {"r0": {"saver": 550}, "r1": {"saver": 600}}, id="each rank has such a thread"),
        pytest.param(False, {"r0": {}, "r1": {"log": 60}}, id="it runs for a short time"),
        pytest.param(False, {"r0": {}, "r1": {}}, id="there is none"),
    ],
)
def test_a_thread_that_does_not_explain_the_wait_is_not_named(
    running: bool, threads: dict[str, dict[str, int]]
) -> None:
    finding = with_threads(running, **threads)
    assert facts(finding).thread is None
    assert "thread" not in finding.cause


@pytest.mark.parametrize("delay_ms", [0, 8])
def test_a_small_delay_is_seen_without_the_time_in_the_run_queue(delay_ms: int) -> None:
    random = np.random.default_rng(3)
    plain = noiseless({}, STEPS, 2) * random.normal(1, 0.01, (STEPS, 2, 1))
    plain[:, 1] += delay_ms * MS * BACKWARD
    queued = (random.exponential(15 * MS, (STEPS, 2)) * (random.random((STEPS, 2)) < 0.6)).astype(np.int64)
    own = (plain + queued[:, :, None] * BACKWARD).astype(np.int64)
    rank, steps = columns(own)
    counters = {"running_ns": flat(plain.sum(axis=2).astype(np.int64)), "run_delay_ns": flat(queued)}
    findings = findings_in(straggler(evidence_of(rank, with_columns(steps, **counters))))
    if not delay_ms:
        assert findings == []
        return
    (finding,) = findings
    assert (finding.ranks, finding.phase, finding.severity) == ([1], "backward", "info")
    assert facts(finding).excess_ns == pytest.approx(delay_ms * MS, rel=0.1)
    assert (facts(finding).cause, cause_ns(finding)["preempted"]) == ("own-work", 0)
    assert re.match(r"\+[\d.]+ ms a step without time in the run queue, \d+ % of the step; ", finding.measure)


def test_no_other_rank_is_slow_where_the_run_queue_is_counted_too_long() -> None:
    finding = judged(ranks=2, run_delay_ns=46)  # Of a delay of 40 ms.
    assert (finding.ranks, facts(finding).cause) == ([1], "preempted")
