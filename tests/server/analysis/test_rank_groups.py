"""Ranks of other process groups are not compared, as beside tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.finding import NotJudged
from ddpobs_server.analysis.findings.straggler import straggler
from ddpobs_server.analysis.steps.joined_steps import join
from ddpobs_server.analysis.steps.pipeline import within_parts
from ddpobs_server.analysis.steps.rank_groups import groups_of

from ddpobs import wire
from tests.support.analysis.judged import only
from tests.support.analysis.scenario import MS, Slow, columns, evidence_of, noiseless, own_times

GROUPS = [(0, 2), (1, 3)]
BACKWARD = wire.OWN_PHASES.index("backward")


def hellos(groups: Sequence[tuple[int, ...]]) -> dict[int, wire.Hello]:
    """Identity of the ranks of these groups."""
    return {
        rank: wire.Hello(
            host="here",
            pid=rank,
            device="cpu",
            backend="gloo",
            versions={},
            settings={"group_ranks": len(ranks), "group_first": ranks[0]},
        )
        for ranks in groups
        for rank in ranks
    }


def apart() -> dict[str, Any]:
    return {"separate_groups_reason": "gradients are reduced over 2 of 4 ranks", "hellos": hellos(GROUPS)}


def of_uneven_groups(*slow: Slow) -> wire.Ints:
    """Own times of four ranks; those of the second group take 30 ms longer in each step."""
    own = own_times(100, 4, 3, slow)
    own[:, GROUPS[1], BACKWARD] += 30 * MS
    return own


def test_the_slow_rank_of_a_group_is_named_and_no_rank_of_a_slower_group() -> None:
    own = of_uneven_groups(Slow(2, "forward", 40))
    finding = only(straggler(evidence_of(*columns(own), world_size=4, **apart())))
    assert (finding.ranks, finding.phase) == ([2], "forward")
    assert "over the other members of its process group, ranks 0 and 2" in finding.measure


def test_a_group_that_computes_more_than_another_has_no_slow_rank() -> None:
    own = of_uneven_groups()
    assert straggler(evidence_of(*columns(own), world_size=4, **apart())) == []


def test_the_page_compares_within_the_groups() -> None:
    own = noiseless({1: ("backward", 30), 3: ("backward", 30), 2: ("forward", 40)})
    joined = within_parts(join(*columns(own)), groups_of(hellos(GROUPS), 4))
    later_ns = joined.own_ns[0] - joined.own_ns[0, 0]
    assert later_ns.tolist() == [0, 0, 40 * MS, 0]


@pytest.mark.parametrize(
    "known",
    [
        hellos([(0, 1, 2, 3)]),
        hellos(GROUPS)
        | {3: wire.Hello(host="", pid=3, device="cpu", backend="gloo", versions={}, settings={"group_ranks": 2})},
        hellos([(0,), (1,), (2,), (3,)]),
        {},
    ],
    ids=["the world", "not known of a rank", "each alone", "nothing known"],
)
def test_groups_that_are_no_parts_of_the_world_or_not_known_are_none(known: dict[int, wire.Hello]) -> None:
    assert groups_of(known, 4) == []


def test_ranks_of_groups_that_are_not_known_are_not_judged() -> None:
    own = np.array(of_uneven_groups(Slow(2, "forward", 40)))
    assert straggler(evidence_of(*columns(own), world_size=4, separate_groups_reason="why")) == [
        NotJudged("straggler", "why")
    ]
