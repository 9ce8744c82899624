"""Times of runs and attempts in the list, the API, the report and the terminal: those of the ranks' own clocks."""

from __future__ import annotations

import time
from typing import Any

import httpx

from benchmarks.rig.collector import Collector
from ddpobs import wire
from ddpobs.shared.quantities import time_of_day, time_range
from tests.support.cli import invoke
from tests.support.server.batches import batch, get, put, steps

S = 10**9
ACCOUNT = wire.Account(
    started_ns=0, imported_ns=S, ready_ns=2 * S, until_ns=3 * S, steps=5, phases_ns=[0] * len(wire.PHASES)
)


def end(kind: str, at_ns: int = 0) -> list[wire.Event]:
    return [wire.Event(kind=kind, at_ns=at_ns, step=5, detail={})]


def times_of(url: str, run: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run in the list, and its attempts."""
    (listed,) = (item for item in get(url, "/runs", limit=500)["runs"] if item["run"] == run)
    return listed, get(url, f"/runs/{run}/attempts")["attempts"]


def test_a_run_from_a_spool_has_the_times_of_its_ranks_and_not_of_its_arrival(shared: Collector, run: str) -> None:
    began_ns = time.time_ns() - 3600 * S
    ended_ns = began_ns + 21 * S
    for rank, began_s, ends_s in ((0, 0, 20), (1, 1, 21)):  # The start counts from rank 0, the end from the last rank.
        for seq, (at_s, events) in enumerate([(began_s + 2, []), (ends_s, end("goodbye", (ends_s - began_s) * S))]):
            anchor = wire.Anchor(wall_ns=began_ns + at_s * S, monotonic_ns=(at_s - began_s) * S)
            own = steps(20, 5) if seq == 0 else None
            put(shared.url, batch(run, seq, rank, anchor=anchor, steps=own, account=ACCOUNT, events=events))
    listed, (attempt,) = times_of(shared.url, run)
    for times in (listed, attempt):
        assert (times["began_ns"], times["ended_ns"]) == (began_ns, ended_ns)
    assert (listed["state"], listed["duration_ns"]) == ("finished", 21 * S)
    report = httpx.get(f"{shared.url}/api/v1/runs/{run}/report.html").text
    assert f"<dt>ran</dt><dd>{time_range(began_ns, ended_ns, is_dated=True)}</dd>" in report
    (line,) = (line for line in invoke("list", "--search", run, "--collector", shared.url).stdout.splitlines()[1:])
    assert time_of_day(began_ns)[:16] in line
    lines = invoke("report", run, "--collector", shared.url).stdout.splitlines()
    assert f"finished; ran {time_range(began_ns, ended_ns, is_dated=True)}" in lines


def test_the_terminal_has_the_reason_of_an_end_that_no_finding_has(shared: Collector, run: str) -> None:
    anchor = wire.Anchor(wall_ns=time.time_ns() - 3600 * S, monotonic_ns=10 * S)
    ended = [wire.Event(kind="terminated", at_ns=0, step=5, detail={"signal": "SIGTERM"})]
    put(shared.url, batch(run, 0, 0, anchor=anchor, account=ACCOUNT, events=ended))
    lines = invoke("report", run, "--collector", shared.url).stdout.splitlines()
    covered = time_range(anchor.wall_ns - 10 * S, anchor.wall_ns, is_dated=True)
    assert f"failed: rank 0: ended by SIGTERM; ran {covered}" in lines


def test_a_rank_whose_clock_is_ahead_does_not_end_after_its_arrival(shared: Collector, run: str) -> None:
    ahead = wire.Anchor(wall_ns=time.time_ns() + 3600 * S, monotonic_ns=10 * S)
    put(shared.url, batch(run, 0, 0, anchor=ahead, account=ACCOUNT, events=end("goodbye")))
    listed, _ = times_of(shared.url, run)
    assert listed["created_ns"] == listed["began_ns"] == listed["ended_ns"] == listed["last_seen_ns"]


def test_a_run_with_attempts_begins_with_the_first_and_ends_with_the_last(shared: Collector, run: str) -> None:
    began_ns = time.time_ns() - 3600 * S
    for number in range(2):
        key, source, own_ns = f"{number + 1:016x}", f"{number + 16:016x}", began_ns + 100 * number * S
        anchor = wire.Anchor(wall_ns=own_ns + 30 * S, monotonic_ns=30 * S)
        ended = end("terminated" if number == 0 else "goodbye")
        put(shared.url, batch(run, 0, 0, attempt=key, source=source, anchor=anchor, account=ACCOUNT, events=ended))
    listed, attempts = times_of(shared.url, run)
    assert [row["began_ns"] for row in attempts] == [began_ns, began_ns + 100 * S]
    assert (listed["began_ns"], listed["ended_ns"]) == (began_ns, began_ns + 130 * S)
    assert listed["duration_ns"] == 130 * S
