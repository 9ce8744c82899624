"""The finding `crash` about commands and ranks that ended before their training."""

from __future__ import annotations

import pytest
from ddpobs_server.analysis.findings.crash import CrashFacts, crash

from ddpobs import wire
from tests.support.analysis.failures import evidence
from tests.support.analysis.judged import facts_of, only

S = 10**9


AT = "1970-01-01 00:00:01 UTC; "


@pytest.mark.parametrize(
    ("kind", "facts", "title"),
    [
        (
            "failed",
            {"exit_status": 2, "output": "usage\nrun.py: error: no such option"},
            "The command ended with exit status 2 before any rank joined: {at}"
            "cause: not known; its output ends with: run.py: error: no such option",
        ),
        (
            "failed",
            {"exit_status": 137},
            "The command ended with exit status 137 before any rank joined: a shell returns 137 after SIGKILL; {at}"
            "cause: not known: no output of it was kept",
        ),
        (
            "died",
            {"signal": "SIGKILL", "oom_kills": 1, "output": "loading"},
            "The command was killed by SIGKILL before any rank joined: {at}cause: its host ran out of memory",
        ),
    ],
)
def test_a_command_that_failed_before_any_rank_joined_names_no_rank(
    kind: str, facts: dict[str, str | int], title: str
) -> None:
    event = wire.Event(kind=kind, at_ns=0, detail={"stage": "command", "wall_ns": S, **facts})
    finding = only(crash(evidence(events=[(0, event)], hosts={0: "node-a"}, world_size=1)))
    assert (finding.title, finding.where, finding.ranks) == (title.format(at=AT), "host node-a", [])
    assert facts_of(CrashFacts, finding).output == facts.get("output")


def test_a_rank_that_a_signal_ended_before_its_training_is_named() -> None:
    died = wire.Event(kind="died", at_ns=0, detail={"stage": "start", "wall_ns": S, "signal": "SIGSEGV"})
    victim = wire.Event(kind="terminated", at_ns=0, detail={"stage": "start", "wall_ns": 2 * S, "signal": "SIGTERM"})
    finding = only(crash(evidence(events=[(0, victim), (1, died)])))
    assert (finding.title, finding.ranks) == (
        f"Rank 1 was killed before its training began: rank 0 ended by SIGTERM after it; {AT}cause: SIGSEGV",
        [1],
    )
