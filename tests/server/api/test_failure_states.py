"""Runs that hang, fail or are killed, as a client sends them: states, first finding, and attempts."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.rig.collector import Collector
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, MS, STEP_MS, batch, get, layout, pulse, put, source_of, steps

S = 10**9
NEXT = "b" * 16
FIRST = 2 * S // (STEP_MS * MS)
"""The step that begins two seconds after the start of its process."""


def failed(error: str, message: str, wall_s: int, **facts: Any) -> wire.Event:
    detail = {"error": error, "message": message, "wall_ns": wall_s * S, "phase": "forward", "bucket": -1, **facts}
    return wire.Event(kind="failed", at_ns=0, step=6, detail=detail)


def event(kind: str, **detail: wire.Scalar) -> wire.Event:
    return wire.Event(kind=kind, at_ns=0, step=8, detail=dict(detail))


def account_of_steps(count: int, **phases_ms: int) -> wire.Account:
    """The account of a process that started two seconds before its first step, with the mean phases of its steps."""
    phases_ns = [count * phases_ms.get(phase, 0) * MS for phase in wire.PHASES]
    until_ns = (FIRST + count) * STEP_MS * MS
    return wire.Account(
        started_ns=0, imported_ns=S, ready_ns=2 * S, until_ns=until_ns, steps=count, phases_ns=phases_ns
    )


def listed_state(url: str, run: str) -> str:
    """State of the run in the list of runs, which must be the state of the run alone."""
    (listed,) = (item for item in get(url, "/runs", limit=500)["runs"] if item["run"] == run)
    assert listed["state"] == get(url, f"/runs/{run}")["state"]
    return str(listed["state"])


def rank_states(url: str, run: str) -> list[str]:
    return [rank["state"] for rank in get(url, f"/runs/{run}/ranks")["ranks"]]


def findings(url: str, run: str) -> list[dict[str, Any]]:
    return list(get(url, f"/runs/{run}/diagnostics")["findings"])


def attempts(url: str, run: str) -> list[dict[str, Any]]:
    return list(get(url, f"/runs/{run}/attempts")["attempts"])


def test_a_run_has_failed_once_a_rank_fails_although_other_ranks_still_send(shared: Collector, run: str) -> None:
    url = shared.url
    for rank in range(2):
        put(url, batch(run, 0, rank, steps=steps(0, 5)))
    put(url, batch(run, 1, 1, events=[failed("ValueError", "a bad sample\nsecond line", 5)]))
    put(url, batch(run, 1, 0, pulse=pulse("bucket")))
    assert listed_state(url, run) == "failed"
    assert rank_states(url, run) == ["running", "failed"]
    crash = findings(url, run)[0]
    assert crash["code"] == "crash"
    assert (crash["verdict"], crash["cause"]) == ("Rank 1 failed in forward of step 6", "ValueError: a bad sample")
    (attempt,) = attempts(url, run)
    assert (attempt["outcome"], attempt["reason"], attempt["first_rank"]) == (
        "failed",
        "ValueError: a bad sample, in forward of step 6",
        1,
    )
    assert 0 < attempt["began_ns"] <= attempt["ended_ns"]


def test_an_attempt_begins_with_the_process_of_rank_0_as_its_account_does(shared: Collector, run: str) -> None:
    for rank in range(2):
        put(shared.url, batch(run, 0, rank, steps=steps(FIRST, 5), account=account_of_steps(5)))
    began_ns = get(shared.url, f"/runs/{run}/account")["began_ns"]
    assert attempts(shared.url, run)[0]["began_ns"] == began_ns == 10**18


def test_the_account_of_a_short_run_divides_each_step_as_the_figure_does(shared: Collector, run: str) -> None:
    # Each rank waits in every other step: their sums are equal, and yet no data moves.
    for rank in range(2):
        waits_ms = np.where(np.arange(10) % 2 == rank, 40, 0)
        waiting = steps(FIRST, 10, exposed_comm_ns=waits_ms * MS, backward_ns=(45 - waits_ms) * MS)
        put(shared.url, batch(run, 0, rank, steps=waiting, account=account_of_steps(10, exposed_comm=20)))
    parts = {part["part"]: part["rank_ns"] for part in get(shared.url, f"/runs/{run}/account")["parts"]}
    assert (parts["waiting_for_ranks"], parts.get("exposed_comm")) == (2 * 10 * 20 * MS, None)
    summary = get(shared.url, f"/runs/{run}/figures/phases")["summary"]
    assert "waiting for ranks 20 %" in summary
    assert "moving data" not in summary


def test_the_rank_that_failed_first_is_named_and_its_victims_are_not(shared: Collector, run: str) -> None:
    victim = failed("RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]:4711", 5)
    put(shared.url, batch(run, 0, 0, events=[victim]))
    put(shared.url, batch(run, 0, 1, events=[failed("ValueError", "a bad sample", 6)]))
    assert findings(shared.url, run)[0]["ranks"] == [1]
    assert attempts(shared.url, run)[0]["first_rank"] == 1


def test_a_run_hangs_until_a_rank_goes_on_and_the_hang_stays_in_its_history(shared: Collector, run: str) -> None:
    url = shared.url
    waiting = pulse("bucket", 12, bucket=1, place="train.py:9")
    blocked = pulse(
        "data", 14, phase="data", place="train.py:5 → dataset.py:31", stack=["train.py:5 main", "dataset.py:31"]
    )
    put(url, batch(run, 0, 0, steps=steps(0, 5), layouts=[layout()], pulse=waiting))
    assert listed_state(url, run) == "hung"  # Rank 1 has not sent anything yet.
    put(url, batch(run, 0, 1, steps=steps(0, 5), pulse=pulse("data", 3)))
    assert listed_state(url, run) == "running"
    put(url, batch(run, 1, 1, pulse=blocked, anchor=wire.Anchor(wall_ns=10**18, monotonic_ns=1)))
    assert listed_state(url, run) == "hung"
    assert rank_states(url, run) == ["hung", "hung"]
    hang = findings(url, run)[0]
    assert (hang["code"], hang["ranks"], hang["parameters"]) == ("hang", [1], ["stem.weight"])
    blocked_at = (
        r"The run hangs in step \d+, waiting for rank 1: no progress for \d+ s; "
        r"cause: rank 1 has been in the data loader for \d+ s "
        r"\(train.py:5 → dataset.py:31\); rank 0 waits in bucket 0.1 "
    )
    assert re.match(blocked_at, hang["title"])
    assert hang["evidence"]["stacks"]["1"] == ["train.py:5 main", "dataset.py:31"]
    (attempt,) = attempts(url, run)
    assert (attempt["outcome"], attempt["ended_ns"]) == ("hung", None)
    assert re.match(blocked_at, attempt["reason"])

    over = event("stuck", activity="data", idle_ns=20 * S, place="dataset.py:31")
    again = event("stuck", activity="data", idle_ns=31 * S, place="dataset.py:40")
    put(
        url,
        batch(run, 2, 1, pulse=pulse("code"), events=[over, again], anchor=wire.Anchor(wall_ns=10**18, monotonic_ns=2)),
    )
    assert listed_state(url, run) == "running"
    (past,) = (finding for finding in findings(url, run) if finding["code"] == "hang")
    assert (past["severity"], past["evidence"]["length_ns"], past["evidence"]["times"]) == ("info", 31 * S, 2)
    rank = get(url, f"/runs/{run}/ranks")["ranks"][1]
    assert (rank["pulse"]["stack"], rank["stuck_pulse"]["stack"]) == ([], blocked.stack)


@pytest.mark.parametrize("activity", ["checkpoint", "compile"])
def test_a_checkpoint_or_a_compilation_of_a_minute_is_no_hang(shared: Collector, run: str, activity: str) -> None:
    put(shared.url, batch(run, 0, 0, pulse=pulse(activity, 60)))
    put(shared.url, batch(run, 0, 1, pulse=pulse("bucket", 60)))
    assert listed_state(shared.url, run) == "running"
    assert [finding for finding in findings(shared.url, run) if finding["code"] == "hang"] == []


def test_pulses_of_older_clients_make_no_hang(shared: Collector, run: str) -> None:
    for rank in range(2):
        put(shared.url, batch(run, 0, rank, pulse=pulse("", 60, patience_ns=0)))
    assert listed_state(shared.url, run) == "running"


def test_a_rank_that_ended_before_the_others_hangs_them(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, 0, 0, events=[event("goodbye")]))
    put(shared.url, batch(run, 0, 1, pulse=pulse("bucket", 12)))
    assert listed_state(shared.url, run) == "hung"
    assert rank_states(shared.url, run) == ["finished", "hung"]
    assert findings(shared.url, run)[0]["cause"].startswith("rank 0 has ended its training; rank 1 waits in bucket 0.0")


@pytest.mark.parametrize("reporter", [1, 0], ids=["under its own identity", "by a neighbour"])
def test_a_process_that_died_without_a_word_fails_the_run(shared: Collector, run: str, reporter: int) -> None:
    for rank in range(2):
        put(shared.url, batch(run, 0, rank, steps=steps(0, 5)))
    facts: dict[str, wire.Scalar] = {"wall_ns": 9 * S, "phase": "backward", "bucket": 2}
    if reporter == 0:
        facts |= {"rank": 1, "source": source_of(1)}
    put(shared.url, batch(run, 1, reporter, events=[event("died", **facts)]))
    assert listed_state(shared.url, run) == "failed"
    assert rank_states(shared.url, run) == ["running", "failed"]
    crash = findings(shared.url, run)[0]
    assert (crash["code"], crash["ranks"], crash["buckets"]) == ("crash", [1], [2])
    (attempt,) = attempts(shared.url, run)
    assert (attempt["outcome"], attempt["first_rank"]) == ("failed", 1)
    assert attempt["reason"].startswith("ended without an error")


def test_two_deaths_that_a_neighbour_reports_are_both_read(shared: Collector, run: str) -> None:
    for rank in range(3):
        put(shared.url, batch(run, 0, rank, world_size=3))
    deaths = [event("died", wall_ns=rank * S, rank=rank, source=source_of(rank)) for rank in (2, 1)]
    put(shared.url, batch(run, 1, 0, world_size=3, events=deaths))
    crash = findings(shared.url, run)[0]
    assert (crash["ranks"], list(crash["evidence"]["victims"])) == ([1], ["2"])
    assert rank_states(shared.url, run) == ["running", "failed", "failed"]


def test_a_report_of_a_death_changes_no_source_of_another_attempt(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, 0, 1))
    report = event("died", rank=1, source=source_of(1))
    put(shared.url, batch(run, 0, 0, source="c" * 16, attempt=NEXT, events=[report]))
    (rank,) = get(shared.url, f"/runs/{run}/ranks", attempt=ATTEMPT)["ranks"]
    assert rank["ended"] == ""


def test_a_goodbye_that_arrives_after_the_report_of_a_death_finishes_the_rank(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, 0, 0, world_size=1, events=[event("died", wall_ns=S)]))
    assert listed_state(shared.url, run) == "failed"
    put(shared.url, batch(run, 1, 0, world_size=1, events=[event("goodbye")]))
    assert listed_state(shared.url, run) == "finished"
    assert [finding for finding in findings(shared.url, run) if finding["code"] == "crash"] == []


@pytest.mark.parametrize(
    ("kinds", "ended"),
    [
        (["goodbye", "failed"], "failed"),
        (["failed", "goodbye"], "failed"),
        (["failed", "terminated"], "failed"),
        (["terminated", "goodbye"], "terminated"),
        (["terminated", "died"], "terminated"),
        (["goodbye", "died"], "finished"),
    ],
)
def test_the_stronger_end_stays_in_any_order_of_arrival(
    shared: Collector, run: str, kinds: list[str], ended: str
) -> None:
    for seq, kind in enumerate(kinds):
        put(shared.url, batch(run, seq, events=[event(kind)]))
    (rank,) = get(shared.url, f"/runs/{run}/ranks")["ranks"]
    assert rank["ended"] == ended


def test_a_run_of_which_all_ranks_are_terminated_and_its_attempt_failed(shared: Collector, run: str) -> None:
    for rank in range(2):
        put(shared.url, batch(run, 0, rank, events=[event("terminated", signal="SIGTERM", wall_ns=S)]))
    assert listed_state(shared.url, run) == "failed"
    (attempt,) = attempts(shared.url, run)
    assert (attempt["outcome"], attempt["reason"]) == ("failed", "ended by SIGTERM")
    assert [finding for finding in findings(shared.url, run) if finding["code"] == "crash"] == []


def test_a_hang_that_ended_by_sigterm_keeps_its_verdict(shared: Collector, run: str) -> None:
    end = [event("terminated", signal="SIGTERM")]
    put(shared.url, batch(run, 0, 0, pulse=pulse("bucket", 30), events=end))
    put(shared.url, batch(run, 0, 1, pulse=pulse("data", 32, place="dataset.py:31"), events=end))
    hang = findings(shared.url, run)[0]
    assert (hang["code"], hang["ranks"]) == ("hang", [1])
    assert "data loader for 32 s (dataset.py:31)" in hang["title"]


def test_each_attempt_has_its_outcome_and_an_unfinished_one_is_superseded(shared: Collector, run: str) -> None:
    error = [failed("ValueError", "a bad sample", 5)]
    for number, events in enumerate(([], error, [event("goodbye")], [])):
        for rank in range(2):
            attempt, source = f"{number + 1:016x}", f"{16 * (number + 1) + rank:016x}"
            anchor = wire.Anchor(wall_ns=10**18 + number, monotonic_ns=0)
            put(
                shared.url,
                batch(run, 0, rank, attempt=attempt, source=source, anchor=anchor, steps=steps(0, 5), events=events),
            )
    rows = attempts(shared.url, run)
    assert [row["outcome"] for row in rows] == ["superseded", "failed", "finished", "running"]
    assert [row["ended_ns"] is None for row in rows] == [False, False, False, True]
    assert [row["ordinal"] for row in rows] == [0, 1, 2, 3]
    assert [(row["ranks"], row["steps"]) for row in rows] == [(2, 5)] * 4
    assert rows[1]["reason"] == "ValueError: a bad sample, in forward of step 6"
    assert listed_state(shared.url, run) == "running"


def test_the_state_filter_accepts_the_states_of_failures(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, events=[failed("ValueError", "", 1)]))
    listed = get(shared.url, "/runs", limit=500, state="failed")["runs"]
    assert run in {item["run"] for item in listed}
    assert run not in {item["run"] for item in get(shared.url, "/runs", limit=500, state="hung")["runs"]}


def interrupt(wall_s: float, kind: str = "interrupted", **facts: wire.Scalar) -> wire.Event:
    """An event at a time, with the anchor of `end`."""
    detail = {"wall_ns": int(wall_s * S), "phase": "backward", **facts}
    return wire.Event(kind=kind, at_ns=int(wall_s * S), step=9, detail=detail)


def end(run: str, seq: int, rank: int, *events: wire.Event) -> wire.Batch:
    """A batch on a host whose monotonic clock began with its wall clock."""
    return batch(run, seq, rank, events=list(events), anchor=wire.Anchor(wall_ns=100 * S, monotonic_ns=100 * S))


FAILED = {"error": "ValueError", "message": "a bad sample"}
VICTIM = {"error": "RuntimeError", "message": "Connection closed by peer"}


@pytest.mark.parametrize(
    ("other", "state"),
    [
        (interrupt(95, "failed", **VICTIM), "interrupted"),
        (interrupt(95, "failed", **FAILED), "interrupted"),
        (interrupt(95, "terminated", signal="SIGTERM"), "interrupted"),
        (interrupt(95, "died", signal="SIGKILL"), "interrupted"),
        (interrupt(89, "died"), "interrupted"),  # Seen alive last a second before.
        (interrupt(89, "died", signal="SIGSEGV"), "failed"),
        (interrupt(89, "died", oom_kills=1), "failed"),
        (interrupt(85, "died"), "failed"),
        (interrupt(85, "failed", **FAILED), "failed"),
        (interrupt(85, "failed", **VICTIM), "failed"),
        (interrupt(85, "failed", error="KeyboardInterrupt"), "interrupted"),  # As older clients report it.
    ],
)
def test_the_first_cause_decides_between_an_interrupt_and_a_failure(
    other: wire.Event, state: str, shared: Collector, run: str
) -> None:
    put(shared.url, end(run, 0, 0, interrupt(90)))
    put(shared.url, end(run, 0, 1, other))
    assert listed_state(shared.url, run) == state
    assert attempts(shared.url, run)[0]["outcome"] == state
    codes = [finding["code"] for finding in findings(shared.url, run)]
    assert ("crash" in codes) == (state == "failed")


def test_a_source_that_trains_again_is_interrupted_no_more(shared: Collector, run: str) -> None:
    put(shared.url, end(run, 0, 0, interrupt(90)))
    assert listed_state(shared.url, run) == "interrupted"
    assert rank_states(shared.url, run) == ["interrupted"]
    put(shared.url, end(run, 2, 0, interrupt(92, "resumed")))
    put(shared.url, end(run, 1, 0, interrupt(91)))  # Late, from the spool.
    assert listed_state(shared.url, run) == "running"
    put(shared.url, end(run, 3, 0, interrupt(93), interrupt(94, "resumed"), interrupt(95)))
    assert listed_state(shared.url, run) == "interrupted"


@pytest.mark.parametrize(("idle_s", "codes"), [(12, []), (25, ["hang"])])
def test_a_rank_hangs_only_if_it_did_before_the_interrupt(
    idle_s: int, codes: list[str], shared: Collector, run: str
) -> None:
    facts: dict[str, Any] = {
        "idle_ns": idle_s * S,
        "patience_ns": 8 * S,
        "outcome": "ended",
        "activity": "bucket",
        "place": "",
    }
    put(shared.url, end(run, 0, 0, interrupt(90)))
    put(shared.url, end(run, 0, 1, interrupt(100, "stuck", **facts), interrupt(100, "terminated")))
    assert [finding["code"] for finding in findings(shared.url, run)] == codes
    assert listed_state(shared.url, run) == "interrupted"
    assert httpx.get(f"{shared.url}/metrics").status_code == 200


def test_the_duration_in_the_list_begins_with_the_process(shared: Collector, run: str) -> None:
    now = wire.Anchor(wall_ns=time.time_ns(), monotonic_ns=10 * S)
    put(shared.url, batch(run, 0, 0, anchor=now, account=account_of_steps(5)))
    (listed,) = (item for item in get(shared.url, "/runs", limit=500)["runs"] if item["run"] == run)
    (attempt,) = get(shared.url, f"/runs/{run}/attempts")["attempts"]
    assert (listed["began_ns"], listed["ended_ns"]) == (attempt["began_ns"], attempt["ended_ns"])
    assert listed["duration_ns"] == now.wall_ns - attempt["began_ns"] == 10 * S
