"""The page of one run in a real Chromium: its figures, the selection in its address, and the report file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from ddpobs_server.figures.registry import NAMES
from playwright.sync_api import expect

from ddpobs import wire
from ddpobs.shared.words import LABELS, finding_lines
from tests.support.analysis.scenario import with_columns
from tests.support.columns import make_spans
from tests.support.server import batches
from tests.support.server.browsing import (
    EVIL,
    MS,
    STEPS,
    Visit,
    batch,
    click,
    column,
    drawn,
    mark,
    paused_visit,
    put,
    settle,
)

DRAWN = len(NAMES) - 1
"""Figures of the run `picture`, which has no account."""


def summary(visit: Visit, figure: str) -> str:
    return str(visit.page.locator(f"#figure-{figure} .summary").inner_text())


def test_the_figures_show_the_slow_rank(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    visit.page.get_by_role("heading", name="Rank 1 is slow in backward").wait_for()
    assert summary(visit, "ranks").startswith(
        f"2 of 2 ranks, steps 1 to {STEPS - 1}. Rank 1 delays the others most: 30 ms"
    )
    assert column(visit, "ranks", "cells", "delay") == pytest.approx([30.0] * (STEPS - 1) + [0.0] * (STEPS - 1))
    assert column(visit, "phases", "bins", "backward") == [35.0] * STEPS
    assert "Rank 1 was last, 30 ms after" in summary(visit, "step")
    assert column(visit, "phases", "findings", "verdict")[0].startswith("Rank 1 is slow")
    expect(visit.page.locator("#processes tbody tr")).to_have_count(2)
    assert visit.errors == []
    assert all(address.startswith(url) for address in visit.requests)


def test_the_card_of_a_finding_has_its_parts_in_the_order_of_all_views(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    labels = visit.page.locator(".finding.critical .parts dt").all_inner_texts()
    assert labels == [label for label in LABELS.values() if label in labels]
    assert {"do", "saves"} <= set(labels)
    expect(visit.page.locator(".finding.critical")).to_have_text(re.compile(r"saves\s*\d"))
    expect(visit.page.get_by_role("img", name="critical")).to_have_count(1)
    visit.page.get_by_role("button", name="show in the figures").first.click()
    settle(visit)
    expect(visit.page.locator(".finding.chosen")).to_have_count(1)
    expect(visit.page).to_have_url(re.compile("finding=straggler-1"))
    visit.page.wait_for_function("() => document.getElementById('selection').getBoundingClientRect().y < 100")
    bottom = "document.getElementById('selection').getBoundingClientRect().bottom"
    assert visit.page.evaluate(f"document.querySelector('#figure-phases h2').getBoundingClientRect().y - {bottom}") > 0
    finding = {part: f"the {part}" for part in reversed(LABELS)} | {"gain": {"text": "31 %"}, "when": ""}
    lines = "async (finding) => (await import('/static/finding_parts.js')).findingLines(finding)"
    assert visit.page.evaluate(lines, finding) == [list(line) for line in finding_lines(finding)]


def test_a_step_shows_compute_waiting_and_moving_apart(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture?step=7")
    assert column(visit, "step", "compute", "rank") == [0, 0, 1, 1]
    assert column(visit, "step", "compute", "compute_ms") == [15, 5, 45, 5]
    moving = column(visit, "step", "moving", "moving_ms")
    waiting = column(visit, "step", "moving", "waiting_ms")
    assert [round(ms) for ms in waiting] == [30, 0, 0, 0]
    assert [round(ms) for ms in moving] == [7, 0, 7, 0]
    assert column(visit, "step", "moving", "late") == [" for rank 1", "", "", ""]
    # One arrow from the late rank's second row to the end of the other rank's wait.
    arrow = [column(visit, "step", "arrows", name) for name in ("late", "rank", "from", "from_ms", "to_ms")]
    assert [value for (value,) in arrow] == [1, 0, 1.775, pytest.approx(56), pytest.approx(56)]
    assert "The longest wait is rank 0's at bucket 0.0: 30 ms for rank 1." in summary(visit, "step")
    expect(visit.page.locator("#step")).to_have_value("7")


def test_a_step_is_about_the_selected_bucket(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture?step=7&bucket=0.1")
    assert column(visit, "step", "chosen comm", "rank") == [0, 1]
    assert column(visit, "step", "chosen comm", "right") == pytest.approx([63, 63])
    # It takes 23 ms of a step of 70: enough to be seen in the whole step.
    assert axis(visit, "step") == pytest.approx([-0.7, 70.7])
    assert summary(visit, "step").endswith("No rank waits at bucket 0.1.")


def axis(visit: Visit, figure: str) -> list[float]:
    """Both ends of a figure's horizontal axis."""
    ends: list[float] = visit.page.evaluate(
        """(figure) => {
          const roots = Bokeh.documents.map((document) => document.roots()[0]);
          const { x_range } = roots.find(({ name }) => name === figure);
          return [x_range.start, x_range.end];
        }""",
        figure,
    )
    return ends


def test_tags_and_note_are_edited_and_another_run_is_chosen_to_compare_with(browser: Any, url: str) -> None:
    put(url, msgspec.structs.replace(batch("labelled", 0, slow=False, host="node"), world_size=1))
    visit = drawn(browser, f"{url}/runs/labelled")
    visit.page.get_by_role("button", name="Tags and note").click()
    visit.page.get_by_role("textbox", name="Tags").fill(f"nightly, {EVIL[:20]}")
    visit.page.get_by_role("textbox", name="Note").fill("first try")
    visit.page.get_by_role("button", name="Save").click()
    visit.page.locator("dialog").wait_for(state="detached")
    expect(visit.page.locator("#labels .tag")).to_have_text(["#nightly", f"#{EVIL[:20]}"])
    visit.page.reload()
    settle(visit)
    expect(visit.page.locator("#labels .note")).to_have_text("first try")
    visit.page.get_by_role("button", name="compare with").click()
    dialog = visit.page.get_by_role("dialog", name="Compare labelled with")
    expect(dialog.get_by_role("combobox")).to_have_value("picture")
    dialog.get_by_role("button", name="Compare").click()
    visit.page.wait_for_url(f"{url}/compare?a=picture&b=labelled")
    assert visit.errors == []


def test_a_click_on_a_finding_selects_it_and_its_link_restores_the_view(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    visit.page.get_by_role("button", name="Rank 1 is slow in backward").click()
    settle(visit)
    selected = f"{url}/runs/picture?steps=1-{STEPS - 1}&rank=1&bucket=0.0&finding=straggler-1"
    expect(visit.page).to_have_url(selected)
    assert summary(visit, "phases").startswith("Steps 1 to 59 of rank 1: a median of 70 ms a step; backward 7")
    assert mark(visit, "phases", "selection") == [1, STEPS, None]
    other = drawn(browser, selected)
    expect(other.page.locator(".finding.chosen")).to_have_count(1)
    expect(other.page.locator("#rank")).to_have_value("1")
    expect(other.page.locator("#bucket-facts li")).to_have_text("head.weight (1)")
    named = drawn(browser, f"{url}/runs/picture?finding=straggler-1")
    expect(named.page).to_have_url(selected)
    assert named.errors == []
    expect(drawn(browser, f"{url}/runs/picture?bucket=1").page.locator("#bucket")).to_have_value("0.1")
    expect(other.page.get_by_role("button", name="Rank 1 is slow")).to_have_attribute("aria-pressed", "true")
    visit.page.go_back()
    visit.page.wait_for_url(f"{url}/runs/picture")
    visit.page.locator("#figure-phases .summary").get_by_text("of all ranks").wait_for()
    assert visit.errors == []


def test_a_click_on_a_figure_selects_its_rank_and_step(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    reason = "It is shown because its delay is the median of steps 10 to 59."
    assert summary(visit, "step").endswith(reason)
    click(visit, "ranks", 20.5, 1)
    expect(visit.page).to_have_url(f"{url}/runs/picture?rank=0&step=20")
    assert reason not in summary(visit, "step")
    assert summary(visit, "step").startswith("Step 20: 2 of 2 ranks")
    assert mark(visit, "phases", "step") == [None, None, 20.5]
    visit.page.get_by_role("button", name="Later step").click()
    settle(visit)
    expect(visit.page).to_have_url(f"{url}/runs/picture?rank=0&step=21")
    visit.page.locator("#steps").fill("10-19")
    visit.page.locator("#steps").press("Enter")
    settle(visit)
    assert column(visit, "phases", "bins", "first") == list(range(30))  # With ten steps before and after them.
    assert mark(visit, "phases", "selection") == [10, 20, None]
    assert summary(visit, "phases").startswith("Steps 10 to 19 of rank 0")


def test_of_many_ranks_each_can_be_found(browser: Any, url: str) -> None:
    many, slow = 120, 77
    for rank in range(many):
        put(url, msgspec.structs.replace(batch("many", rank, slow=rank == slow, host="node"), world_size=many))
    visit = drawn(browser, f"{url}/runs/many")
    assert column(visit, "ranks", "cells", "rank")[0] == slow
    assert f": 64 of {many} ranks (the slowest first)" in summary(visit, "step")
    assert slow in column(visit, "step", "compute", "rank")
    visit.page.locator("#order").select_option("rank")
    visit.page.locator("#rank").fill(str(slow))
    visit.page.locator("#rank").press("Enter")
    settle(visit)
    assert column(visit, "ranks", "rows", "top") == [slow - 0.5]
    expect(visit.page.locator("#rows")).to_have_value("1")  # The part in which its row is seen.
    visit.page.locator("#match").fill("5, 90-99")
    visit.page.locator("#match").press("Enter")
    settle(visit)
    assert sorted(set(column(visit, "step", "compute", "rank"))) == [5, *range(90, 100)]
    expect(visit.page.locator("#processes tbody tr")).to_have_count(11)
    assert visit.errors == []


def shifted(payload: wire.Batch, offset: int) -> wire.Batch:
    """The batch with step numbers increased by `offset`, as of a rank that had more inputs."""
    assert payload.steps is not None
    assert payload.spans is not None
    steps = with_columns(payload.steps, step=payload.steps.step + offset)
    spans = with_columns(payload.spans, step=payload.spans.step + offset)
    return msgspec.structs.replace(payload, steps=steps, spans=spans)


def test_a_bucket_of_many_is_seen_with_what_is_around_it(browser: Any, url: str) -> None:
    """Sixteen buckets, each reduced in 1 ms as soon as it is full."""
    count, step, ready_ns = 16, np.repeat(np.arange(STEPS), 16), 11 * MS + np.tile(np.arange(16), STEPS) * MS
    parameters = [wire.Parameter(name="w", size=1)]
    buckets = [wire.Bucket(size_bytes=4, dtype="float32", parameters=parameters)] * count
    for rank in range(2):
        payload = msgspec.structs.replace(batch("sixteen", rank, slow=False, host="node"), unused=[], events=[])
        began = 10**12 * (rank + 1) + step * 70 * MS
        spans = make_spans(
            step=step,
            bucket=np.tile(np.arange(count), STEPS),
            ready_ns=began + ready_ns,
            launched_ns=began + ready_ns,
            started_ns=wire.UNKNOWN,
            done_ns=began + ready_ns + MS,
        )
        layout = wire.Layout(module=0, name="model", revision=0, comm="all_reduce", buckets=buckets)
        put(url, msgspec.structs.replace(payload, spans=spans, layouts=[layout]))
    left, right = axis(drawn(browser, f"{url}/runs/sixteen?step=7&bucket=0.9"), "step")
    assert 0 < left < 20 < right < 30


def test_the_table_of_ranks_begins_with_the_finding_s_rank_and_then_the_slowest(browser: Any, url: str) -> None:
    for rank in range(3):
        put(url, msgspec.structs.replace(batch("rows", rank, slow=rank == 2, host="node"), world_size=3))
    visit = drawn(browser, f"{url}/runs/rows")
    rows = visit.page.locator("#processes tbody tr")
    expect(rows.locator("button")).to_have_text(["2", "0", "1"])
    expect(visit.page.get_by_role("columnheader", name="Dropped")).to_have_count(0)
    visit.page.locator("#rank").fill("1")
    visit.page.locator("#rank").press("Enter")
    settle(visit)
    expect(rows.locator("button")).to_have_text(["1", "2", "0"])
    expect(visit.page.locator("#processes tr[aria-current=true] button")).to_have_text("1")


def test_ranks_whose_step_numbers_are_far_apart_are_compared_and_drawn(browser: Any, url: str) -> None:
    for rank, offset in enumerate((2000, 500, 2000)):
        put(url, shifted(msgspec.structs.replace(batch("uneven", rank, rank == 2, "node"), world_size=3), offset))
    visit = drawn(browser, f"{url}/runs/uneven")
    assert set(column(visit, "ranks", "cells", "rank")) == {0, 1, 2}
    assert summary(visit, "step").endswith("No data of rank 1.")
    visit.page.locator("#rank").fill("1")
    visit.page.locator("#rank").press("Enter")
    visit.page.get_by_text("Steps 500 to 559 of rank 1").wait_for()
    assert visit.errors == []


def test_a_rank_without_steps_is_named_where_it_is_missing(browser: Any, url: str) -> None:
    for rank in range(2):
        put(url, msgspec.structs.replace(batch("two", rank, slow=False, host="node"), world_size=3))
    put(url, batches.batch("two", rank=2, world_size=3, attempt="a" * 16))
    visit = drawn(browser, f"{url}/runs/two")
    assert summary(visit, "ranks").endswith("No steps to compare of rank 2.")
    assert summary(visit, "step").endswith("No data of rank 2.")


def test_one_rank_is_compared_with_none(browser: Any, url: str) -> None:
    put(url, msgspec.structs.replace(batch("alone", 0, slow=False, host="node"), world_size=1))
    visit = drawn(browser, f"{url}/runs/alone")
    assert summary(visit, "ranks") == "The ranks can be compared in no step."
    assert visit.errors == []


def test_a_spike_beyond_the_axis_is_marked(browser: Any, url: str) -> None:
    payload = batches.batch("spike", steps=batches.steps(0, 40), world_size=1)
    assert payload.steps is not None
    late = 5000 * MS * (payload.steps.step == 20)
    longer = with_columns(payload.steps, end_ns=payload.steps.end_ns + late, other_ns=payload.steps.other_ns + late)
    put(url, msgspec.structs.replace(payload, steps=longer))
    visit = drawn(browser, f"{url}/runs/spike")
    assert column(visit, "phases", "longer", "time") == [5100]
    assert column(visit, "phases", "longer", "x") == [20.5]


def later(payload: wire.Batch) -> wire.Batch:
    """The next steps of the same rank."""
    assert payload.steps is not None
    steps = payload.steps
    moved = with_columns(
        steps,
        step=steps.step + STEPS,
        collective=steps.collective + STEPS,
        start_ns=steps.start_ns + STEPS * 70 * MS,
        end_ns=steps.end_ns + STEPS * 70 * MS,
    )
    return msgspec.structs.replace(payload, seq=1, steps=moved, spans=None, layouts=[], unused=[], events=[])


def test_a_live_run_is_followed_and_open_evidence_stays_open(browser: Any, url: str) -> None:
    for rank in range(2):
        put(url, batch("live", rank, slow=rank == 1, host="node"))
    visit = paused_visit(browser)
    visit.page.goto(f"{url}/runs/live")
    visit.page.clock.resume()
    settle(visit)
    first = visit.page.locator("#step").input_value()
    visit.page.locator("#findings summary").first.click()
    visit.page.locator("#processes button").last.focus()
    for rank in range(2):
        put(url, later(batch("live", rank, slow=rank == 1, host="node")))
    visit.page.clock.fast_forward(5000)
    visit.page.locator("#facts").get_by_text("120 steps").wait_for()
    visit.page.wait_for_function("first => document.getElementById('step').value !== first", arg=first)
    expect(visit.page.locator("#findings details[open]")).to_have_count(1)
    visit.page.wait_for_function("() => document.activeElement.dataset.key === 'rank 0'")
    expect(visit.page.locator("#facts")).to_have_text(re.compile("^(?!.*UTC.*UTC).*UTC", re.DOTALL))
    visit.page.locator("#step").fill("3")
    visit.page.locator("#step").press("Enter")
    visit.page.get_by_role("button", name="Follow the run").wait_for()


def test_a_failed_request_is_shown_in_its_figure(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    refused = {"status": 422, "json": {"title": "Too many rows", "detail": "request fewer steps"}}
    visit.page.route("**/figures/step?*", lambda route: route.fulfill(**refused))
    visit.page.get_by_role("button", name="Later step").click()
    visit.page.locator("#figure-step").get_by_text("request fewer steps").wait_for()
    settle(visit)
    expect(visit.page.locator("#figure-step canvas")).to_have_count(0)
    expect(visit.page.locator("#figure-buckets canvas")).not_to_have_count(0)


def test_a_malformed_part_of_the_address_is_named(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture?steps=9-x&rank=-1&step=1.5&bucket=a&order=size")
    expected = "The address has a malformed steps, rank, step, bucket, order, which is left out."
    expect(visit.page.locator("#wrong")).to_have_text(expected)


def test_a_wrong_address_shows_a_page(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/run/picture/")
    visit.page.get_by_role("heading", name="No such page").wait_for()
    visit.page.get_by_role("link", name="The list of runs").click()
    visit.page.get_by_role("link", name="picture").wait_for()
    assert httpx.get(f"{url}/api/v1/run").headers["content-type"] == "application/problem+json"


def test_the_page_is_accessible_light_and_dark(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture?rank=1")
    for scheme, paper in (("light", "#fff"), ("dark", "#171e26")):
        visit.page.emulate_media(color_scheme=scheme)
        visit.page.wait_for_function(
            """([paper, figures]) => Bokeh.documents.length === figures
              && Bokeh.documents.every((document) => document.roots()[0].border_fill_color === paper)""",
            arg=[paper, DRAWN],
        )
        settle(visit)
        results = Axe().run(visit.page)
        assert results.violations_count == 0, results.generate_report()


def test_the_report_is_one_file_that_draws_all_figures(browser: Any, url: str, tmp_path: Path) -> None:
    answer = httpx.get(f"{url}/api/v1/runs/picture/report.html")
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    file = tmp_path / "report.html"
    file.write_bytes(answer.content)
    visit = Visit(browser, file.as_uri())
    visit.page.get_by_role("heading", name="Rank 1 is slow in backward").wait_for()
    visit.page.get_by_role("heading", name="Ranks", exact=True).wait_for()
    expect(visit.page.get_by_role("link", name=f"{url}/runs/picture")).to_have_count(1)
    help_link = visit.page.get_by_role("link", name="straggler", exact=True)
    expect(help_link).to_have_attribute("href", f"{url}/help/straggler")
    visit.page.locator("[data-item=item-buckets] canvas").first.wait_for()
    expect(visit.page.locator("[data-item] .bk-Figure")).to_have_count(DRAWN)
    expect(visit.page.get_by_text(re.escape(EVIL))).to_have_count(0)
    expect(visit.page.locator("img")).to_have_count(0)
    assert "owned" not in visit.page.title()
    assert visit.requests == [file.as_uri()]
    assert visit.errors == []
    paper = "() => new Set(Bokeh.documents.map((document) => document.roots()[0].border_fill_color))"
    body = "getComputedStyle(document.body).backgroundColor"
    for scheme, color, background in (("light", "#fff", "rgb(255, 255, 255)"), ("dark", "#171e26", "rgb(23, 30, 38)")):
        visit.page.emulate_media(color_scheme=scheme)
        visit.page.wait_for_function(f"color => [...({paper})()].at(-1) === color", arg=color)
        assert visit.page.evaluate(body) == background
        assert visit.page.evaluate("Bokeh.documents.length") == DRAWN
        results = Axe().run(visit.page)
        assert results.violations_count == 0, results.generate_report()
    visit.page.set_viewport_size({"width": 390, "height": 844})
    visit.page.wait_for_function("document.documentElement.scrollWidth === 390")  # Once the figures are drawn again.
