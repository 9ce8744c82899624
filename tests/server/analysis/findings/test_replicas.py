"""The findings about replicas that train apart: gradients that nobody reduced, parameters that differ."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.findings.not_reduced import NotReducedFacts, not_reduced
from ddpobs_server.analysis.findings.replicas_differ import ReplicasDifferFacts, replicas_differ

from ddpobs import wire
from tests.support.analysis.failures import evidence
from tests.support.analysis.judged import facts_of, only

S = 10**9


def fingerprint(step: int, gradients: list[int], parameters: list[int], buffers: list[int]) -> wire.Fingerprint:
    return wire.Fingerprint(
        module=0,
        synchronised=step,
        names=["a.weight", "a.bias"],
        buffer_names=["bn.mean"],
        gradients=np.array(gradients),
        parameters=np.array(parameters),
        buffers=np.array(buffers),
    )


EQUAL = ([1, 2], [3, 4], [5])


def test_a_parameter_that_differs_after_the_optimizer_is_named_with_its_ranks_and_steps() -> None:
    samples = [(rank, fingerprint(0, *EQUAL)) for rank in range(3)]
    samples += [(rank, fingerprint(1000, [1, 2], [3, 9 if rank == 1 else 4], [5])) for rank in range(3)]
    finding = only(replicas_differ(evidence(fingerprints=samples)))
    assert (finding.ranks, finding.parameters, finding.steps) == ([1], ["a.bias"], (0, 1000))
    assert finding.when == "since a step from 1 to 1000"
    assert facts_of(ReplicasDifferFacts, finding).parts == ["parameters"]
    assert "gradients agree, parameters differ" in finding.cause


def test_gradients_that_differ_point_before_the_optimizer_and_buffers_to_themselves() -> None:
    differing = [(rank, fingerprint(0, [1 + rank, 2], [3 + rank, 4], [5])) for rank in range(2)]
    assert "before the optimizer" in only(replicas_differ(evidence(fingerprints=differing))).cause
    buffers = [(rank, fingerprint(0, [1, 2], [3, 4], [5 + rank])) for rank in range(2)]
    finding = only(replicas_differ(evidence(fingerprints=buffers)))
    assert (finding.parameters, facts_of(ReplicasDifferFacts, finding).parts) == (["bn.mean"], ["buffers"])
    assert finding.when == "since step 0 or before"


def test_shards_are_compared_among_the_ranks_that_hold_the_same_ones() -> None:
    """Ranks 0 and 2 hold the first shards of module 1, ranks 1 and 3 the second."""

    def sample(rank: int, value: int) -> tuple[int, wire.Fingerprint]:
        number = wire.replicas_module(1, rank % 2, 4)
        return rank, msgspec.structs.replace(fingerprint(0, [1, 2], [rank % 2, value], [5]), module=number)

    assert replicas_differ(evidence(fingerprints=[sample(rank, rank % 2) for rank in range(4)], world_size=4)) == []
    differing = [sample(rank, rank) for rank in range(4)]
    finding = only(replicas_differ(evidence(fingerprints=differing, world_size=4)))
    assert (finding.ranks, finding.parameters) == ([2, 3], ["a.bias"])
    assert facts_of(ReplicasDifferFacts, finding).module == 1


def test_equal_replicas_and_a_single_rank_raise_nothing() -> None:
    assert replicas_differ(evidence(fingerprints=[(rank, fingerprint(0, *EQUAL)) for rank in range(4)])) == []
    assert replicas_differ(evidence(fingerprints=[(0, fingerprint(0, *EQUAL))])) == []


def test_gradients_that_were_never_reduced_are_named_with_the_reason() -> None:
    detail: dict[str, wire.Scalar] = {"reason": "bypassed", "parameters": "l.weight, l.bias", "count": 2, "module": 0}
    events = [(rank, wire.Event(kind="not_reduced", at_ns=0, step=3, detail=detail)) for rank in range(2)]
    finding = only(not_reduced(evidence(events=events)))
    assert (finding.ranks, finding.parameters, facts_of(NotReducedFacts, finding).reason) == (
        [0, 1],
        ["l.weight", "l.bias"],
        "bypassed",
    )
    assert "did not go through the DistributedDataParallel module" in finding.cause


def test_a_module_that_never_synchronised_is_named() -> None:
    event = wire.Event(kind="never_synchronised", at_ns=0, detail={"optimizer_steps": 60})
    finding = only(not_reduced(evidence(events=[(0, event), (1, event)])))
    assert (finding.verdict, finding.where) == ("No gradient was ever reduced", "ranks 0 and 1")
    assert finding.measure == "60 optimizer steps, each rank for itself"


@pytest.mark.parametrize(
    ("every", "exact", "severity", "verdict"),
    [
        (1, True, "info", "The script's own collectives reduce the gradients before each optimizer step"),
        (8, True, "info", "The replicas are averaged every 8 optimizer steps"),
        (8, False, "warning", "Own collectives may reduce or average every 8 optimizer steps"),
    ],
)
def test_replicas_that_the_script_keeps_together_are_no_fault(
    every: int, exact: bool, severity: str, verdict: str
) -> None:
    early = wire.Event(
        kind="not_reduced", at_ns=0, step=1, detail={"reason": "unsynchronised", "module": 0, "count": 2}
    )
    own = [exchanged(steps, every, exact=exact) for steps in (60, 2 * every + 1)]
    events = [(rank, event) for rank in range(2) for event in (own[0], early, own[1])]
    finding = only(not_reduced(evidence(events=events)))
    assert (finding.severity, finding.verdict) == (severity, verdict)
    assert finding.measure == f"{60 // every} exchanges in 60 optimizer steps, none by DDP"
    assert finding.cause == ("" if exact else "not known, because only their size is that of the model")


def test_replicas_that_differ_after_an_exchange_were_not_averaged() -> None:
    events = [(rank, exchanged(60, 8, exact=True)) for rank in range(2)]
    apart = [(rank, fingerprint(0, [0, 0], [3, 4 + rank], [])) for rank in range(2)]
    judged = evidence(events=events, fingerprints=apart)
    assert not_reduced(judged) == []
    finding = only(replicas_differ(judged))
    assert (finding.severity, finding.cause) == (
        "critical",
        "the script's own collectives did not make the parameters equal",
    )


def exchanged(steps: int, every: int, *, exact: bool) -> wire.Event:
    count = steps // every
    facts: dict[str, wire.Scalar] = {"module": 0, "optimizer_steps": steps, "exchanges": count, "every": every}
    return wire.Event(kind="exchanged", at_ns=steps, detail=facts | {"exact": count * exact})


def test_a_parameter_that_nobody_reduces_is_a_fault_beside_the_scripts_own_exchanges() -> None:
    detail: dict[str, wire.Scalar] = {"reason": "unfrozen", "parameters": "l.weight", "count": 1, "module": 0}
    own = exchanged(60, 8, exact=True)
    events = [(0, wire.Event(kind="not_reduced", at_ns=0, step=3, detail=detail)), (0, own)]
    findings = not_reduced(evidence(events=events))
    assert isinstance(findings, list)
    assert sorted(finding.severity for finding in findings) == ["critical", "info"]
