"""Verdicts that change with time alone, on the collector's clock."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from ddpobs_server.reports.outline import DiagnosisOutline
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.run_state import state_of_run
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Run, Store

from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, pulse, steps

S = 10**9
START_NS = 1000 * S


class Clock:
    def __init__(self) -> None:
        self.ns = START_NS

    def __call__(self) -> int:
        return self.ns


def arrive(store: Store, at_s: float, seq: int, rank: int, **fields: Any) -> None:
    anchor = wire.Anchor(wall_ns=START_NS + int(at_s * S), monotonic_ns=seq)
    body = wire.encode(batch("run", seq, rank, anchor=anchor, **fields))
    store.ingest([Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), START_NS + int(at_s * S))])


def hangs(reports: Reports) -> list[dict[str, Any]]:
    found = reports.diagnostics("run", ATTEMPT)["findings"]
    return [finding for finding in found if finding["code"] == "hang"]


def the_run(store: Store) -> Run:
    run = store.run("run")
    assert run is not None
    return run


def test_ranks_that_all_hang_without_another_batch_are_found_after_seconds(store: Store) -> None:
    clock = Clock()
    reports = Reports(store, Settings(), clock)
    arrive(store, 0, 0, 0, pulse=pulse("bucket", 7))
    arrive(store, 0, 0, 1, pulse=pulse("data", 7))
    assert hangs(reports) == []
    assert reports.last_diagnosis(the_run(store))[1]
    clock.ns += 4 * S
    assert not reports.last_diagnosis(the_run(store))[1]
    assert [finding["ranks"] for finding in hangs(reports)] == [[1]]


def test_a_rank_that_stops_sending_is_named_by_a_run_whose_other_rank_waits(store: Store) -> None:
    clock = Clock()
    reports = Reports(store, Settings(), clock)
    arrive(store, 0, 0, 1, pulse=pulse("code"), steps=steps(0, 5))
    for seq in range(8):
        arrive(store, 2 * seq, seq, 0, pulse=pulse("bucket", 2 * seq), steps=steps(0, 5) if seq == 0 else None)
    clock.ns += 14 * S
    (hang,) = hangs(reports)
    assert (hang["ranks"], hang["evidence"]["kind"]) == ([1], "stopped")
    assert hang["cause"].startswith("rank 1 sent nothing for 14 s")
    assert state_of_run(the_run(store), Settings(), clock()) == "hung"


def test_a_rank_without_any_batch_is_named_if_the_others_wait(store: Store) -> None:
    clock = Clock()
    for seq in range(8):
        arrive(store, 2 * seq, seq, 0, pulse=pulse("collective", 2 * seq, waits_in="barrier"))
    clock.ns += 14 * S
    (hang,) = hangs(Reports(store, Settings(), clock))
    assert hang["cause"] == "rank 1 sent nothing for 14 s; rank 0 waits in barrier after step 7"


def test_a_hang_that_ended_in_silence_keeps_its_verdict_in_a_lost_run(store: Store) -> None:
    clock = Clock()
    reports = Reports(store, Settings(), clock)
    arrive(store, 0, 0, 0, pulse=pulse("bucket", 20))
    arrive(store, 0, 0, 1, pulse=pulse("data", 22))
    for wait_s, state in ((0, "hung"), (15, "hung"), (3600, "lost")):
        clock.ns += wait_s * S
        assert state_of_run(the_run(store), Settings(), clock()) == state
        (hang,) = hangs(reports)
        assert (hang["ranks"], hang["evidence"]["kind"]) == ([1], "absent")
        assert bool(lost(reports)) == (state == "lost")
    assert [attempt.outcome for attempt in reports.attempts(the_run(store))] == ["lost"]


def lost(reports: Reports) -> list[dict[str, Any]]:
    found = reports.diagnostics("run", ATTEMPT)["findings"]
    return [finding for finding in found if finding["code"] == "lost"]


def test_a_run_whose_ranks_all_fall_silent_is_lost_until_one_sends_again(store: Store) -> None:
    clock = Clock()
    reports = Reports(store, Settings(), clock)
    for rank in range(2):
        arrive(store, rank, 0, rank, pulse=pulse("code", 1))
    clock.ns += 30 * S
    assert lost(reports) == []
    clock.ns += 2 * S
    (finding,) = lost(reports)
    assert (finding["severity"], finding["ranks"]) == ("warning", [0, 1])
    assert finding["where"] == "ranks 0 and 1 in backward of step 7"
    explained = DiagnosisOutline.of(reports.diagnostics("run", ATTEMPT)).findings[0]
    assert explained.explanation == (finding["cause"], finding["where"], finding["remedy"], "")
    assert not any("no rank sends" in reason for reason in reports.diagnostics("run", ATTEMPT)["missing"])
    arrive(store, 32, 1, 0, pulse=pulse("code", 1))
    assert lost(reports) == []


@pytest.mark.parametrize("end", ["failed", "died", "interrupted", "goodbye", "terminated"])
def test_a_run_with_an_end_that_says_more_is_not_lost(store: Store, end: str) -> None:
    clock = Clock()
    everyone = end in ("goodbye", "terminated")
    for rank in range(2):
        events = [wire.Event(kind=end, at_ns=0, detail={"wall_ns": clock.ns})] if rank or everyone else []
        arrive(store, 0, 0, rank, pulse=pulse("code", 1), events=events)
    clock.ns += 3600 * S
    assert lost(Reports(store, Settings(), clock)) == []
    assert state_of_run(the_run(store), Settings(), clock()) != "lost"


@pytest.mark.parametrize("ended", [True, False])
def test_the_diagnosis_of_a_run_that_is_over_or_lost_is_computed_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    clock = Clock()
    reports = Reports(store, Settings(), clock)
    goodbye = [wire.Event(kind="goodbye", at_ns=0)] if ended else []
    for rank in range(2):
        arrive(store, 0, 0, rank, events=goodbye)
    clock.ns += 40 * S
    first = reports.diagnostics("run", ATTEMPT)
    clock.ns += 40 * S
    assert reports.diagnostics("run", ATTEMPT) is first
    assert reports.last_diagnosis(the_run(store)) == (DiagnosisOutline.of(first), True)


@pytest.mark.parametrize("after_s", [0, 2, 9, 11, 3600])
def test_ranks_that_are_killed_at_once_did_not_hang(store: Store, after_s: int) -> None:
    clock = Clock()
    arrive(store, 0, 0, 0, pulse=pulse("bucket", 1))
    arrive(store, 0, 0, 1, pulse=pulse("code", 1))
    clock.ns += after_s * S
    reports = Reports(store, Settings(), clock)
    assert hangs(reports) == []
    silent = [reason for reason in reports.diagnostics("run", ATTEMPT)["missing"] if "no rank sends any more" in reason]
    assert (len(silent), len(lost(reports))) == (after_s == 11, after_s == 3600)


def test_a_slow_rank_is_not_hung(store: Store) -> None:
    clock = Clock()
    arrive(store, 0, 0, 0, pulse=pulse("bucket", 20))
    arrive(store, 0, 0, 1, pulse=pulse("code", 1))
    assert hangs(Reports(store, Settings(), clock)) == []
    assert state_of_run(the_run(store), Settings(), clock()) == "running"


def test_a_spooled_pulse_of_an_earlier_time_does_not_make_a_rank_stuck(store: Store) -> None:
    arrive(store, 0, 5, 0, pulse=pulse("code", 0))
    arrive(store, 1, 4, 0, pulse=pulse("bucket", 60))
    (source,) = store.sources("run", ATTEMPT)
    assert source.stuck_ns == 0
