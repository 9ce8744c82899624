"""The finding about a run from which nothing arrives any more."""

from __future__ import annotations

from typing import Any

from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.findings.lost import LostFacts, lost

from ddpobs import wire
from tests.support.analysis.failures import evidence
from tests.support.analysis.judged import facts_of, only

S = 10**9
HELLO = wire.Hello(host="n1", pid=4711, device="cpu", backend="gloo", versions={}, settings={})


def pulse(phase: Any, step: int, **fields: Any) -> wire.Pulse:
    return wire.Pulse(at_ns=0, phase=phase, step=step, synchronised=step, **fields)


def silent(last_batch_s: dict[int, int], **fields: Any) -> Evidence:
    """A run whose ranks sent their last batches at these seconds after 23:10:00."""
    began_ns = 1_795_907_400 * S
    last_batch_ns = {rank: began_ns + at_s * S for rank, at_s in last_batch_s.items()}
    return evidence(is_lost=True, last_batch_ns=last_batch_ns, **({"world_size": len(last_batch_s)} | fields))


def test_a_lost_run_names_the_ranks_that_were_last_heard_with_their_places() -> None:
    pulses = {
        0: pulse("exposed_comm", 412),
        1: pulse("other", 412, place="train.py:31 → data.py:9 load"),
        2: pulse("exposed_comm", 412),
    }
    finding = only(lost(silent({0: 53, 1: 51, 2: 52}, pulses=pulses, hosts={0: "n1", 1: "n1", 2: "n2"})))
    assert (finding.severity, finding.ranks, finding.steps) == ("warning", [0, 1, 2], (412, 412))
    assert finding.verdict == "No rank has sent anything since 2026-11-28 23:10:53 UTC"
    assert finding.measure == "all 3 ranks fell silent within 5 s"
    assert finding.cause == "not known: no end was reported from ranks 0, 1 and 2"
    assert finding.where == (
        "hosts n1, n2, ranks 0 and 2 in exposed communication of step 412, "
        "rank 1 in your loop in step 412 (train.py:31 → data.py:9 load)"
    )
    assert facts_of(LostFacts, finding).earlier_ns == {1: 2 * S, 2: 1 * S}


def test_ranks_that_fell_silent_first_and_ranks_that_never_sent_are_told_apart() -> None:
    judged = silent({0: 53, 1: 23, 2: 22}, world_size=4, pulses={rank: pulse("forward", 7) for rank in range(3)})
    finding = only(lost(judged))
    assert finding.ranks == [0]
    assert finding.measure == "rank 3 never sent anything; ranks 1 and 2 fell silent 30 s before the last ones"
    assert finding.where == "rank 0 in forward of step 7"


def test_a_rank_that_finished_is_not_awaited_and_a_single_rank_has_its_process() -> None:
    judged = silent({0: 53, 1: 60}, ended={1: "finished"}, hellos={0: HELLO}, hosts={0: "n1"})
    finding = only(lost(judged))
    assert finding.verdict.endswith("23:11:00 UTC")
    assert (finding.ranks, finding.measure, finding.where) == ([0], "", "host n1, pid 4711")
    assert finding.cause == "not known: no end was reported from rank 0"


def test_many_places_are_counted() -> None:
    pulses = {rank: pulse("forward", rank) for rank in range(6)}
    finding = only(lost(silent(dict.fromkeys(range(6), 53), pulses=pulses)))
    assert finding.where.endswith("rank 2 in forward of step 2, 3 ranks elsewhere")
