"""Crashes by a collective that timed out: the rank that did not come is named, if it was seen elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ddpobs_server.analysis.findings.crash import crash
from ddpobs_server.analysis.findings.hang import hang

from ddpobs import wire
from tests.support.analysis.failures import TIMEOUT, S, at, gave_up, gave_up_evidence, terminated
from tests.support.analysis.judged import only

SLEPT = (1, wire.Event(kind="stuck", at_ns=0, step=6, detail={
    "activity": "code", "idle_ns": 35 * S, "wall_ns": 121 * S, "place": "a.py:3", "outcome": "went on",
}))  # fmt: skip


@pytest.mark.parametrize(
    ("events", "pulses"),
    [
        pytest.param([gave_up(0)], {"r1": at(104, "code", 18)}, id="still sleeps"),
        pytest.param([gave_up(0), terminated(1, 101)], {"r1": at(99, "code", 13)}, id="terminated by the launcher"),
        pytest.param(
            [gave_up(0), gave_up(1, 122), SLEPT], {"r1": at(121, "bucket", 0, bucket=0)}, id="came afterwards"
        ),
        pytest.param([gave_up(0)], {"r1": at(130, "evaluation", 0)}, id="works on, behind"),
        pytest.param([gave_up(0)], {"r1": at(101, "checkpoint", 0)}, id="saves"),
        pytest.param(
            [gave_up(0), gave_up(2, 101)],
            {"r1": at(104, "code", 18), "r2": at(100, "bucket", 15, bucket=0)},
            id="two ranks waited",
        ),
    ],
)
def test_a_crash_by_a_timeout_names_the_rank_that_did_not_come(
    events: list[tuple[int, wire.Event]], pulses: dict[str, wire.Pulse]
) -> None:
    judged = gave_up_evidence(*events, **pulses)
    finding = only([*crash(judged), *hang(judged)])
    assert (finding.verdict, finding.ranks) == ("Rank 0 ended in step 6, waiting for rank 1", [1])
    assert finding.cause.startswith("rank 1 had been in ")
    assert "(a.py:3)" in finding.cause
    assert "in bucket 0.0 of step 6" in finding.cause
    assert finding.measure == f"RuntimeError: {TIMEOUT}"
    assert (finding.buckets, finding.parameters) == ([0], ["head.weight"])


def test_a_rank_that_ended_its_training_earlier_is_the_one_that_was_waited_for() -> None:
    judged = gave_up_evidence(gave_up(0), r1=at(80, "code", 2))
    finding = only(crash(replace(judged, ended={0: "failed", 1: "finished"})))
    assert (finding.ranks, finding.cause.partition(";")[0]) == ([1], "rank 1 had ended its training")


@pytest.mark.parametrize(
    ("events", "pulses"),
    [
        pytest.param([gave_up(0), gave_up(1)], {"r1": at(99, "bucket", bucket=0)}, id="both waited in one bucket"),
        pytest.param([gave_up(0)], {"r1": at(130, "code", 2, synchronised=7)}, id="went on, place then unknown"),
        pytest.param(
            [gave_up(0)], {"r1": at(104, "code", 18), "r2": at(130, "code", 2, synchronised=7)}, id="a rank is unknown"
        ),
    ],
)
def test_a_crash_by_a_timeout_names_no_rank_and_no_connection_if_none_was_seen_elsewhere(
    events: list[tuple[int, wire.Event]], pulses: dict[str, wire.Pulse]
) -> None:
    finding = only(crash(gave_up_evidence(*events, **pulses)))
    assert (finding.verdict, finding.ranks) == ("Rank 0 lost its connection in forward of step 6", [0])
    assert "connection" not in finding.remedy
