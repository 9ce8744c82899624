"""Finding `comm-bound`: each kind, its remedy and gain, and the runs that only look like it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.evidence import ColumnsTooLargeError, Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.comm_bound import CommBoundFacts, comm_bound

from ddpobs import wire
from tests.support.analysis.judged import facts_of, findings_in
from tests.support.analysis.link_scenario import Columns, Run, on_hosts
from tests.support.analysis.scenario import BASE_MS, MS, columns, evidence_of, with_columns

link_facts = partial(facts_of, CommBoundFacts)

MB = 10**6


def synchronous(extra_ms: list[dict[str, float]], moving_ms: float = 3.0, steps: int = 40) -> Evidence:
    """Noiseless steps of one rank per entry, without bucket spans."""
    own = np.array([[BASE_MS[phase] + extra.get(phase, 0) for phase in wire.OWN_PHASES] for extra in extra_ms])
    return evidence_of(*columns((np.tile(own, (steps, 1, 1)) * MS).astype(np.int64), moving_ms))


def only(judgement: Judgement) -> Finding:
    """Return the only finding, without the questions that were not judged."""
    (finding,) = findings_in(judgement)
    return finding


def processors_of(finding: Finding) -> dict[str, Any]:
    processors = link_facts(finding).processors
    assert isinstance(processors, dict)
    return processors


def large(**changes: Any) -> Run:
    """Three buckets of different size that take 80 of 112 ms on a link of 1 Gbit/s."""
    defaults: dict[str, Any] = {"sizes": [1 * MB, 5 * MB, 4 * MB], "ready_ms": [10.0, 15.0, 20.0]}
    return Run(**defaults | changes)


def many(**changes: Any) -> Run:
    """A hundred buckets of 4 kB, each with a latency of 0.4 ms."""
    ready = np.linspace(0.1, 20.0, 100).tolist()
    return Run(**{"sizes": [4096] * 100, "ready_ms": ready, "alpha_ms": 0.4, "rate": 10.0} | changes)


def disturbed(run: Run, seed: int = 0) -> Run:
    """The same run on hosts where most transfers wait for a processor."""
    random = np.random.default_rng(seed)
    slower = np.where(random.random(run.steps) < 0.2, 1.0, 1 + random.exponential(4.0, run.steps))
    return replace(run, slower=slower)


def test_large_buckets_on_a_slow_link_are_a_matter_of_bandwidth() -> None:
    finding = only(comm_bound(large().evidence(**on_hosts(2, hosts=2))))
    assert (link_facts(finding).kind, finding.severity, finding.phase) == ("bandwidth", "critical", "exposed_comm")
    assert "Compress" in finding.remedy
    assert link_facts(finding).bytes_a_step == 10 * MB
    assert link_facts(finding).message_bytes == [1 * MB, 4 * MB, 5 * MB]
    assert link_facts(finding).beta_bytes_per_s == pytest.approx(125e6, rel=0.01)
    assert link_facts(finding).alpha_ns == pytest.approx(100_000, rel=0.2)
    error_ratio = link_facts(finding).replay_error_ratio
    assert error_ratio is not None
    assert error_ratio < 0.01
    assert finding.gain is not None


def test_the_gain_of_half_the_bytes_is_what_the_run_with_half_the_bytes_saves() -> None:
    finding = only(comm_bound(large().evidence(**on_hosts(2, hosts=2))))
    halved = large(sizes=[MB // 2, 5 * MB // 2, 2 * MB]).evidence()
    saved_ns = np.median(large().evidence().joined.step_ns) - np.median(halved.joined.step_ns)
    assert finding.gain is not None
    casting_ns = 0.5 * 10 * MB
    assert finding.gain.step_ns == pytest.approx(saved_ns - casting_ns, rel=0.02)


def test_many_small_buckets_are_a_matter_of_latency_with_the_gain_of_fewer() -> None:
    finding = only(comm_bound(many().evidence(**on_hosts(2, hosts=2))))
    assert (link_facts(finding).kind, link_facts(finding).messages_a_step) == ("latency", 100)
    assert "bucket_cap_mb" in finding.remedy
    assert "ompress" not in finding.remedy
    one = many(sizes=[4096 * 100], ready_ms=[20.0]).evidence()
    saved_ns = np.median(many().evidence().joined.step_ns) - np.median(one.joined.step_ns)
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(saved_ns, rel=0.02)


def test_one_small_bucket_has_no_gain_and_is_not_critical() -> None:
    finding = only(comm_bound(Run([1284], [1.0], alpha_ms=4.0, before_ms=1.0).evidence(**on_hosts(2))))
    assert (link_facts(finding).kind, finding.severity, finding.gain) == ("latency", "info", None)
    assert "67 % of the steps' time" in finding.title
    assert "ompress" not in finding.remedy + finding.title


@pytest.mark.parametrize("run", [large(), many(), Run([68, 1284], [0.5, 1.0], alpha_ms=1.0, before_ms=1.0)])
def test_transfers_that_wait_for_a_processor_are_a_matter_of_processors(run: Run) -> None:
    finding = only(comm_bound(disturbed(run).evidence(**on_hosts(2, processors="0-1"))))
    assert (link_facts(finding).kind, finding.severity, finding.gain) == ("processor", "info", None)
    assert "2 ranks with 4 threads of training and communication share 2 processors of host node0" in finding.title
    assert "ompress" not in finding.remedy


def test_ranks_that_are_pinned_to_a_core_each_share_two_processors() -> None:
    facts = on_hosts(2)
    for rank, hello in facts["hellos"].items():
        hello.settings["processors"] = str(rank)
    finding = only(comm_bound(disturbed(large()).evidence(**facts)))
    assert processors_of(finding)["processors"] == 2


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "hosts are not recorded"),
        (on_hosts(2), "as many processors as threads"),
        (on_hosts(2, processors=""), "processors and threads of host node0 are not recorded"),
        (on_hosts(2, processors="all of them"), "processors and threads of host node0 are not recorded"),
    ],
)
def test_disturbed_transfers_without_a_shown_lack_of_processors_have_no_known_cause(
    facts: dict[str, Any], reason: str
) -> None:
    finding = only(comm_bound(disturbed(large()).evidence(**facts)))
    assert (link_facts(finding).kind, finding.severity) == (None, "info")
    assert reason in str(link_facts(finding).not_known_because)
    assert finding.cause == f"not known: {link_facts(finding).not_known_because}"


@pytest.mark.parametrize(("delay_share", "kind"), [(0.3, "processor"), (0.05, None)])
def test_the_kernels_waits_for_a_processor_show_a_lack_too(delay_share: float, kind: str | None) -> None:
    evidence = disturbed(large()).evidence(**on_hosts(2))
    took_ns = evidence.steps.end_ns - evidence.steps.start_ns
    counters = {name: getattr(evidence.steps, name) for name in evidence.steps.names}
    steps: Any = SimpleNamespace(**counters | {"run_delay_ns": (delay_share * took_ns).astype(np.int64)})
    steps.select = evidence.steps.select
    finding = only(comm_bound(replace(evidence, steps=steps)))
    assert link_facts(finding).kind == kind
    assert ("30 % of the steps' time" in finding.cause) == (kind is not None)


def test_a_steady_link_is_blamed_although_the_host_has_too_few_processors() -> None:
    finding = only(comm_bound(large().evidence(**on_hosts(2, processors="0-1"))))
    assert link_facts(finding).kind == "bandwidth"
    assert processors_of(finding)["threads_per_processor"] == 2.0


def test_equal_sizes_do_not_separate_latency_from_bandwidth() -> None:
    finding = only(comm_bound(large(sizes=[4 * MB] * 3).evidence(**on_hosts(2, hosts=2))))
    assert link_facts(finding).kind == "bandwidth"
    assert (link_facts(finding).alpha_ns, link_facts(finding).beta_bytes_per_s) == (None, None)
    assert link_facts(finding).bytes_per_s == pytest.approx(125e6, rel=0.02)


def test_a_slow_rank_is_the_stragglers_and_not_communication() -> None:
    late = np.zeros((60, 2))
    late[:, 1] = 100.0
    hidden = Run([MB], [10.0], late_ms=late)
    evidence = hidden.evidence()
    assert (evidence.joined.exposed_ns.mean(axis=1) / evidence.joined.step_ns).mean() > 0.3
    assert comm_bound(evidence) == []


@pytest.mark.parametrize("period", [1, 2, 20])
def test_ranks_that_are_late_in_turn_are_not_communication(period: int) -> None:
    late = np.zeros((60, 2))
    late[np.arange(60), np.arange(60) // period % 2] = 100.0
    assert comm_bound(Run([MB], [10.0], late_ms=late).evidence()) == []


def test_a_run_with_one_rank_has_no_communication_to_judge() -> None:
    assert comm_bound(Run([MB], [1.0], alpha_ms=50.0, ranks=1).evidence()) == []


def test_a_gain_counts_by_the_share_of_the_time_that_is_in_steps() -> None:
    """Nine tenths of the time are between the steps: the same gain is a tenth of the run's."""
    step_ms = float(np.median(large().evidence().joined.step_ns)) / MS
    finding = only(comm_bound(large(pause_ms=9 * step_ms).evidence(**on_hosts(2, hosts=2))))
    assert (link_facts(finding).kind, finding.severity) == ("bandwidth", "info")
    assert "the steps are 10 % of the time examined" in finding.title
    assert finding.gain is not None


def test_communication_outside_of_the_buckets_is_not_blamed_on_them() -> None:
    """An all-gather of the training's own, as long as the step, on every rank."""
    evidence = Run([4096], [10.0]).evidence()
    rows = with_columns(evidence.steps, exposed_comm_ns=evidence.steps.exposed_comm_ns + 50 * MS)
    finding = only(comm_bound(evidence_of(evidence.rank, rows, columns=evidence.columns)))
    assert (link_facts(finding).kind, finding.severity) == ("outside", "info")
    assert "collectives of your own code" in finding.remedy


def test_without_spans_the_share_is_reported_and_no_cause() -> None:
    finding = only(comm_bound(synchronous([{}, {}], moving_ms=50)))
    assert link_facts(finding).exposed_share == pytest.approx(0.4)
    assert (link_facts(finding).waiting_ns, link_facts(finding).moving_ns) == (0, 50 * MS)
    assert (finding.severity, link_facts(finding).kind) == ("info", None)


def test_spans_without_their_layout_are_a_reason_not_to_know() -> None:
    evidence = large().evidence()
    columns_of_run: Any = evidence.columns
    columns_of_run._layout = Run([], []).layout()
    finding = only(comm_bound(evidence))
    assert (
        link_facts(finding).not_known_because
        == "only 0 of the 20 steps that a judgement needs have bucket spans of all ranks"
    )


def test_too_many_spans_are_a_reason_not_to_know() -> None:
    class TooLarge(Columns):
        def spans(self, ranks: list[int], first: int, last: int) -> tuple[wire.Ints, wire.Spans]:
            raise ColumnsTooLargeError("too many rows")

    run = large()
    reader: Any = TooLarge(run.layout(), np.zeros(0, np.int64), wire.Spans.from_table(np.zeros((8, 0), np.int64)), [])
    finding = only(comm_bound(replace(run.evidence(), columns=reader)))
    assert link_facts(finding).not_known_because == "too many rows"


def test_steps_of_two_synchronised_backwards_are_judged_too() -> None:
    """Each backward has a number; the step has the number of its last one."""
    whole = synchronous([{}, {}], moving_ms=50)
    twice = evidence_of(whole.rank, with_columns(whole.steps, collective=2 * whole.steps.collective + 1))
    assert only(comm_bound(twice)) == only(comm_bound(whole))


def test_a_little_exposed_communication_is_not_comm_bound() -> None:
    assert comm_bound(synchronous([{}, {}], moving_ms=30)) == []


def test_waiting_and_moving_are_separated() -> None:
    # Fifteen of sixteen ranks wait 75 ms, and then 70 ms move, of a step of 220 ms.
    finding = only(comm_bound(synchronous([{"backward": 75.0}] + [{}] * 15, moving_ms=70)))
    assert link_facts(finding).waiting_ns == 75 * MS * 15 // 16
    assert link_facts(finding).moving_ns == 70 * MS


@pytest.mark.parametrize("moving_ms", [3.0, 50.0])
def test_one_long_stall_does_not_change_the_finding(moving_ms: float) -> None:
    """An upload of a minute by one rank, for which the other waits, in four hundred steps."""
    own = np.tile(np.array([BASE_MS[phase] for phase in wire.OWN_PHASES]), (400, 2, 1))
    own[200, 0, wire.OWN_PHASES.index("other")] += 60_000
    judgement = comm_bound(evidence_of(*columns((own * MS).astype(np.int64), moving_ms)))
    assert len(judgement) == (moving_ms > 30)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_waiting_at_a_barrier_after_the_step_is_no_finding(checkpoint: bool) -> None:
    """One rank saves every fourth step and all meet at a barrier; recorded as a checkpoint, or as other work."""
    own = np.tile(np.array([BASE_MS[phase] for phase in wire.OWN_PHASES]), (120, 2, 1))
    own[::4, 1, wire.OWN_PHASES.index("other")] += 300
    rank, rows = columns((own * MS).astype(np.int64), barrier=True)
    if checkpoint:
        rows = with_columns(rows, flags=rows.flags | wire.NO_ORIGIN * ((rows.step % 4 == 0) & (rank == 1)))
    assert comm_bound(evidence_of(rank, rows)) == []


@pytest.mark.parametrize(
    "unseen", [{"absences": {"silent": [4, 7]}}, {"separate_groups_reason": "DDP over 2 of 4 ranks"}]
)
def test_neither_waiting_nor_moving_is_claimed_if_the_slow_rank_may_be_unseen(unseen: dict[str, Any]) -> None:
    judgement = comm_bound(replace(synchronous([{}, {}], moving_ms=50), **unseen))
    finding = only(judgement)
    assert "cannot be separated" in str(judgement[-1])
    assert finding.severity == "info"
    assert link_facts(finding).exposed_share == pytest.approx(0.4)
    assert link_facts(finding).waiting_ns is link_facts(finding).moving_ns is None
    assert "ompress" not in finding.remedy
    assert ("ranks 4 and 7" in finding.remedy) == ("absences" in unseen)


def test_too_few_steps_are_not_judged() -> None:
    (result,) = comm_bound(synchronous([{}, {}], moving_ms=50, steps=19))
    assert isinstance(result, NotJudged)
    assert "20" in str(result)
