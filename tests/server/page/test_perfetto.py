"""The run page's button opens a step in a real Perfetto UI in a real Chromium, and its trace processor answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ddpobs_server.page.trace_viewer import viewer_folder
from playwright.sync_api import expect

from tests.support.server.browsing import PATIENCE_MS, drawn

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
def opened(browser: Any, url: str) -> Iterator[tuple[Any, list[Any]]]:
    """The UI in the tab that the run page's button opens, and its requests."""
    visit = drawn(browser, f"{url}/runs/picture?step=2")
    requests: list[Any] = []

    def note(request: Any) -> None:  # playwright refuses a built-in method.
        requests.append(request)

    visit.page.context.on("request", note)
    visit.page.get_by_role("button", name="trace").click()
    with visit.page.expect_popup() as popup:
        visit.page.get_by_role("dialog").get_by_role("button", name="Open in Perfetto").click()
    page = popup.value
    page.set_default_timeout(PATIENCE_MS)
    page.set_viewport_size({"width": 1400, "height": 1000})
    page.wait_for_function("() => self.app?.trace?.engine", timeout=PATIENCE_MS)
    expect(visit.page.locator("#notice")).to_be_hidden()
    yield page, requests
    visit.page.context.close()


@pytest.fixture(scope="module")
def perfetto(opened: tuple[Any, list[Any]]) -> Any:
    return opened[0]


def query(perfetto: Any, sql: str) -> list[list[Any]]:
    rows: list[list[Any]] = perfetto.evaluate(_QUERY, sql)
    return rows


def test_the_ui_contacts_the_collector_alone_and_has_a_policy_of_its_own(
    opened: tuple[Any, list[Any]], url: str
) -> None:
    page, requests = opened
    assert any(request.url.endswith(".wasm") for request in requests)
    elsewhere = [request for request in requests if not request.url.startswith((url, "blob:", "data:"))]
    assert {request.failure for request in elsewhere} <= {"csp"}  # The browser blocked them.
    assert page.title().startswith("picture: step 2")
    own = httpx.get(f"{url}/perfetto/index.html").headers["Content-Security-Policy"]
    assert "'wasm-unsafe-eval'" in own
    assert "unsafe" not in httpx.get(f"{url}/runs/picture").headers["Content-Security-Policy"]


def test_every_slice_stands_on_its_own_ranks_track(perfetto: Any) -> None:
    rows = query(perfetto, f"SELECT process.name, thread.name, slice.name, count(*) FROM {_SLICES} GROUP BY 1, 2, 3")
    counts = {(process, track.partition(":")[0], name): count for process, track, name, count in rows}
    for rank in ("rank 0", "rank 1"):
        assert {name for process, track, name in counts if (process, track) == (rank, "phases")} == {
            *("data", "forward", "backward", "exposed_comm", "optimizer", "other")
        }
        assert [name for process, track, name in counts if (process, track) == (rank, "steps")] == ["step 2"]
        assert [counts[rank, f"bucket {bucket}", f"bucket {bucket}"] for bucket in (0, 1)] == [1, 1]
        assert counts[rank, "gradients", "gradients of bucket 1"] == 1
        assert counts[rank, "bucket 0", "moving"] == 1
    assert counts["rank 0", "bucket 0", f"waiting for rank {SLOW_RANK}"] == 1
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
    assert arrows == [["rank 1", "rank 0", "moving"]]


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
    expect(perfetto.get_by_text("all ranks")).to_have_count(1)


def test_without_the_ui_the_page_says_what_to_install_and_saves_the_trace(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture?steps=1-2")
    visit.page.evaluate("document.getElementById('trace').dataset.viewer = 'no'")
    visit.page.get_by_role("button", name="trace").click()
    dialog = visit.page.get_by_role("dialog", name="Trace")
    dialog.get_by_text("pip install 'ddpobs[perfetto]'").wait_for()
    steps = dialog.get_by_role("textbox", name="Steps")
    expect(steps).to_have_value("1-2")
    steps.fill("1-60")
    dialog.get_by_role("button", name="Save the file").click()
    dialog.get_by_text("expected at most 50, got 60").wait_for()
    steps.fill("2")
    with visit.page.expect_download() as download:
        dialog.get_by_role("button", name="Save the file").click()
    text = Path(download.value.path()).read_text()
    assert '"step 2"' in text
    assert '"step 1"' not in text
    visit.page.close()


def test_a_package_without_the_ui_is_not_served(tmp_path: Path) -> None:
    assert viewer_folder(tmp_path) is None
