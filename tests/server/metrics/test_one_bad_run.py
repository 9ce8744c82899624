"""One run whose rows are damaged costs its own series and list entry; the other runs keep theirs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import httpx
import pytest

from benchmarks.rig import patience
from benchmarks.rig.collector import Collector, collector
from ddpobs import wire
from tests.support.server.batches import batch, get, hello, layout, pulse, put, spans, steps
from tests.support.server.own_metrics import metrics

DAMAGE = {
    "hello": "UPDATE sources SET hello = '{' WHERE run_id = 'bad'",
    "layout": "UPDATE layouts SET body = '{' WHERE run_id = 'bad'",
    "unused": "UPDATE unused SET body = '{' WHERE run_id = 'bad'",
    "event": "UPDATE events SET body = '{' WHERE run_id = 'bad'",
    "columns": "UPDATE chunks SET payload = x'00' WHERE run_id = 'bad'",
}


def scraped(url: str) -> str:
    answer = httpx.get(f"{url}/metrics", params={"only": "runs"})
    assert answer.status_code == 200, answer.text
    return answer.text


def full_batch(run: str) -> wire.Batch:
    unused = [wire.Unused(step=0, module=0, locally=["a"], globally=["a"])]
    events = [wire.Event(kind="comm_hook_set", at_ns=0)]
    return batch(
        run, hello=hello(), layouts=[layout()], steps=steps(0, 9), spans=spans(0, 9), unused=unused, events=events
    )


def damage(running: Collector, statement: str) -> None:
    with sqlite3.connect(running.database, timeout=patience.HANG_S) as connection:
        assert connection.execute(statement).rowcount > 0
    connection.close()


@pytest.mark.parametrize("table", DAMAGE)
def test_a_damaged_row_stops_neither_a_scrape_nor_a_list(tmp_path: Path, table: str) -> None:
    with collector(tmp_path) as running:
        for run in ("first", "bad", "last"):
            assert put(running.url, full_batch(run)).status_code == 201
        damage(running, DAMAGE[table])
        patience.until(lambda: scraped(running.url) and metrics(running.url)("faulty_runs") > 0)
        for _ in range(3):
            text = scraped(running.url)
            listed = {row["run"]: row for row in get(running.url, "/runs")["runs"]}
            for run in ("first", "last"):
                assert f'ddpobs_steps_total{{rank="0",run="{run}"}} 9\n' in text
                assert listed[run]["step_ns"] == 100_000_000
            assert "bad" in listed
        assert httpx.get(f"{running.url}/readyz").json() == {"status": "ready", "faulty_runs": 1}
        lines = [line for line in running.log.read_text().splitlines() if "of run bad failed" in line]
        assert 0 < len(lines) <= len({line.partition(" of run bad")[0].rsplit(" ")[-1] for line in lines})


def test_a_hung_run_that_was_killed_stays_in_the_scrape(shared: Collector, run: str) -> None:
    detail: dict[str, wire.Scalar] = {"idle_ns": 10**10, "outcome": "ended", "activity": "data", "place": "a.py:1"}
    put(shared.url, batch(run, steps=steps(0, 9), pulse=pulse("data", 12)))
    ended = [wire.Event(kind="stuck", at_ns=1, step=9, detail=detail), wire.Event(kind="terminated", at_ns=2, step=9)]
    put(shared.url, batch(run, 1, events=ended))
    (hang,) = (f for f in get(shared.url, f"/runs/{run}/diagnostics")["findings"] if f["code"] == "hang")
    assert hang["evidence"]["kind"] == "ended"
    text = scraped(shared.url)
    assert f'ddpobs_findings{{code="hang",run="{run}",severity="critical"}} 1\n' in text
    assert "ddpobs_hang_info{" not in "".join(line for line in text.splitlines() if f'run="{run}"' in line)
