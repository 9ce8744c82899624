"""Both pages in a real Chromium, fed by a real collector."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ddpobs import wire
from tests.collector import collector
from tests.server import batches
from tests.server.analysis.scenario import with_columns
from tests.server.browsing import STEPS, Visit, batch, held, put


def test_the_list_names_the_run_and_its_worst_finding(browser: Any, url: str) -> None:
    visit = Visit(browser, url)
    visit.page.get_by_text("Rank 1 is slow in backward").wait_for()
    assert visit.page.get_by_role("link", name="picture").get_attribute("href") == "/runs/picture"
    assert visit.complaints == []
    assert all(address.startswith(url) for address in visit.requests)


def test_on_a_phone_the_pages_are_as_wide_as_it_and_pictures_stay_large_enough_to_read(browser: Any, url: str) -> None:
    visit = Visit(browser, url)
    visit.page.set_viewport_size({"width": 390, "height": 844})
    visit.page.get_by_text("Rank 1 is slow in backward").wait_for()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    assert visit.page.locator("#runs td").get_by_text("Rank 1 is slow").bounding_box()["width"] > 250
    visit.page.get_by_role("link", name="picture").click()
    visit.page.locator("#timeline .comm").first.wait_for()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    assert visit.page.locator("#timeline svg").bounding_box()["width"] > 800


def test_the_list_asks_for_no_diagnosis_that_it_knows(browser: Any, url: str) -> None:
    for _ in range(2):
        visit = Visit(browser, url)
        visit.page.get_by_text("Rank 1 is slow in backward").wait_for()
    assert not [address for address in visit.requests if "diagnostics" in address]


def test_of_a_run_without_steps_nothing_is_said_to_be_found(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        put(running.url, batches.batch("begun"))
        for _ in range(2):  # As it is asked for, and as the list knows it.
            visit = Visit(browser, running.url)
            visit.page.locator("#runs td").get_by_text("not judged yet").wait_for()
        visit.page.get_by_role("link", name="begun").click()
        visit.page.get_by_role("heading", name="No step to judge yet.").wait_for()
        visit.page.get_by_text("No bucket spans of this step.").wait_for()
        assert visit.page.get_by_text("Nothing here of").count() == 0


@pytest.mark.parametrize(
    ("pulse", "said"),
    [
        (wire.Pulse(at_ns=0, phase="other", step=3), "other, step 3 ("),
        (wire.Pulse(at_ns=0, phase="exposed_comm", step=3, module=0, bucket=2), "exposed comm, step 3, bucket 2 ("),
        (wire.Pulse(at_ns=0, phase="backward", step=3, module=1, bucket=0), "backward, step 3, bucket 1.0 ("),
    ],
)
def test_the_table_of_ranks_says_where_each_one_is(browser: Any, tmp_path: Path, pulse: wire.Pulse, said: str) -> None:
    with collector(tmp_path) as running:
        put(running.url, batches.batch("here", pulse=pulse))
        visit = Visit(browser, f"{running.url}/runs/here")
        visit.page.locator("#ranks td").get_by_text(said).wait_for()


def test_of_a_run_too_short_to_judge_the_list_says_so(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        put(running.url, batches.batch("short", steps=batches.steps(0, 10)))
        for _ in range(2):
            visit = Visit(browser, running.url)
            visit.page.locator("#runs td").get_by_text(re.compile(r"^nothing found, \d not judged$")).wait_for()


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with collector(tmp_path_factory.mktemp("many")) as running:
        for number in range(70):
            put(running.url, batches.batch(f"run-{number}"))
        yield running.url


def with_older_runs(browser: Any, address: str) -> Visit:
    """A visit to the list with its second page, for which the button was clicked twice at once."""
    visit = held(browser)
    visit.page.goto(address)
    visit.page.get_by_role("button", name="Older runs").wait_for()
    visit.page.evaluate("for (const _ of [1, 2]) document.getElementById('more').click()")
    visit.page.locator("#runs tbody tr").nth(59).wait_for()
    return visit


def listed(visit: Visit) -> list[str]:
    links: list[str] = visit.page.locator("#runs tbody a").all_inner_texts()
    return links


def test_older_runs_come_once_and_stay_with_a_refresh(browser: Any, many_runs: str) -> None:
    visit = with_older_runs(browser, many_runs)
    newest_first = [f"run-{number}" for number in range(69, -1, -1)]
    assert listed(visit) == newest_first[:60]
    put(many_runs, batches.batch("run-69", seq=1, steps=batches.steps(0, 3)))
    visit.page.clock.run_for(15_000)
    visit.page.locator("#runs tbody tr").first.get_by_text("3", exact=True).wait_for()
    assert listed(visit) == newest_first[:60]
    visit.page.get_by_role("button", name="Older runs").click()
    visit.page.locator("#runs tbody tr").nth(69).wait_for()
    assert listed(visit) == newest_first
    assert visit.page.locator("#more").is_hidden()
    assert visit.complaints == []


def test_older_runs_that_do_not_come_are_told_and_can_be_asked_for_again(browser: Any, many_runs: str) -> None:
    visit = with_older_runs(browser, many_runs)
    visit.page.route("**/api/v1/runs?*", lambda route: route.fulfill(status=503, json={"title": "Not ready"}))
    visit.page.get_by_role("button", name="Older runs").click()
    visit.page.get_by_text("Not ready", exact=True).wait_for()
    assert len(listed(visit)) == 60
    visit.page.unroute_all()
    visit.page.get_by_role("button", name="Older runs").click()
    visit.page.locator("#runs tbody tr").nth(69).wait_for()
    visit.page.locator("#notice").wait_for(state="hidden")
    assert not [complaint for complaint in visit.complaints if "503" not in complaint]


def test_the_run_page_names_the_slow_rank_and_draws_it(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/picture")
    visit.page.get_by_role("heading", name="Rank 1 is slow in backward").wait_for()
    visit.page.locator("#timeline rect.comm").first.wait_for()
    assert visit.page.locator("#phases polygon").count() == len(wire.PHASES)
    assert visit.page.locator("#heat rect.cell").count() == 2 * (STEPS - 1)
    assert visit.page.locator("#timeline rect.comm").count() == 4
    assert visit.page.locator("#ranks tbody tr").count() == 2
    assert visit.complaints == []
    assert all(address.startswith(url) for address in visit.requests)


def test_of_many_ranks_those_that_matter_are_drawn(browser: Any, url: str) -> None:
    many, slow = 120, 77
    for rank in range(many):
        put(url, msgspec.structs.replace(batch("many", rank, slow=rank == slow, host="node"), world_size=many))
    visit = Visit(browser, f"{url}/runs/many")
    visit.page.locator("#timeline rect.comm").first.wait_for()
    assert visit.page.locator("#heat-shown").inner_text().startswith(f"32 of {many} ranks")
    assert visit.page.locator("#heat rect.cell").count() == 32 * (STEPS - 1)
    for picture in ("#heat", "#timeline"):
        assert visit.page.locator(picture).get_by_text(f"rank {slow}", exact=True).count() == 1
    assert visit.page.locator("#timeline rect.comm").count() == 200
    assert visit.page.locator("#timeline-shown").inner_text().startswith(f"100 of {many} ranks")
    assert visit.page.locator("#ranks tbody tr").count() == many
    assert visit.complaints == []


def test_of_more_steps_than_an_answer_holds_the_latest_are_drawn(browser: Any, tmp_path: Path) -> None:
    many, last = 1024, 499
    with collector(tmp_path) as running, httpx.Client() as client:
        told = batches.steps(0, last + 1)
        for rank in range(many):
            put(running.url, batches.batch("large", rank=rank, world_size=many, steps=told), client)
        visit = held(browser)
        visit.page.goto(f"{running.url}/runs/large")
        visit.page.locator("#heat rect.cell").last.hover()
        assert "step 498 and 1 more" in visit.page.locator("#tip").inner_text()
        phases = visit.page.locator("#phases rect")
        phases.hover(position={"x": phases.bounding_box()["width"] - 1, "y": 1})
        assert f"step {last}:" in visit.page.locator("#tip").inner_text()
        for picture in ("#phases-shown", "#heat-shown"):
            assert "The latest 390 steps" in visit.page.locator(picture).inner_text()
        assert visit.complaints == []


def moved(sent: wire.Batch, by: int) -> wire.Batch:
    """The batch of a rank whose own step numbers are so much higher: it had more inputs before."""
    steps, spans = (with_columns(columns, step=columns.step + by) for columns in (sent.steps, sent.spans) if columns)
    return msgspec.structs.replace(sent, steps=steps, spans=spans)


def test_ranks_whose_step_numbers_are_far_apart_are_compared_and_drawn(browser: Any, url: str) -> None:
    for rank, by in enumerate((2000, 500, 2000)):
        put(url, moved(msgspec.structs.replace(batch("uneven", rank, rank == 2, "node"), world_size=3), by))
    visit = drawn(browser, f"{url}/runs/uneven")
    assert visit.page.locator("#heat").get_by_text("rank 1", exact=True).count() == 1
    assert visit.page.locator("#heat rect.cell").count() == 3 * (STEPS - 1)
    assert visit.page.locator("#heat-shown").inner_text() == ""
    for picture in ("#phases-shown", "#timeline-shown"):
        assert visit.page.locator(picture).inner_text() == "Nothing here of rank 1."
    visit.page.locator("#rank").select_option("1")
    visit.page.locator("#phases").get_by_text("510", exact=True).wait_for()
    assert visit.page.locator("#phases-shown").inner_text() == ""
    assert visit.complaints == []


def test_a_rank_without_steps_is_named_where_it_is_missing(browser: Any, url: str) -> None:
    for rank in range(2):
        put(url, msgspec.structs.replace(batch("two", rank, slow=False, host="node"), world_size=3))
    put(url, batches.batch("two", rank=2, world_size=3, attempt="a" * 16))
    visit = drawn(browser, f"{url}/runs/two")
    for picture in ("#phases-shown", "#heat-shown", "#timeline-shown"):
        assert visit.page.locator(picture).inner_text() == "Nothing here of rank 2."
    assert visit.page.locator("#heat rect.cell").count() == 2 * (STEPS - 1)


def test_a_click_on_the_heat_map_shows_that_steps_buckets(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/picture")
    visit.page.locator("#timeline rect.comm").first.wait_for()
    visit.page.locator("#heat rect.cell").first.click()
    visit.page.wait_for_function("document.getElementById('step').value === '1'")


def drawn(browser: Any, address: str) -> Visit:
    """A visit to a run whose pictures are drawn, and which is not refreshed."""
    visit = held(browser)
    visit.page.goto(address)
    visit.page.locator("#timeline rect.comm").first.wait_for()
    return visit


def choose_step(visit: Visit, step: str) -> None:
    visit.page.locator("#step").fill(step)
    visit.page.locator("#step").press("Enter")


@pytest.mark.parametrize("step", ["", "-5", "1.5", "1e20"])
def test_what_is_no_step_is_told_and_the_one_shown_stays(browser: Any, url: str, step: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    shown = visit.page.locator("#step").input_value()
    choose_step(visit, step)
    visit.page.get_by_text("A step is a whole number").wait_for()
    assert visit.page.locator("#step").input_value() == shown
    assert visit.complaints == []


def test_what_does_not_come_is_told_and_nothing_else_is_in_its_place(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    visit.page.route("**/api/v1/**", lambda route: route.fulfill(status=503, json={"title": "Not ready"}))
    notice = visit.page.get_by_text("Not ready", exact=True)
    choose_step(visit, "7")
    notice.wait_for()
    assert visit.page.locator("#timeline rect").count() == 0
    visit.page.evaluate("document.getElementById('notice').textContent = ''")
    visit.page.locator("#rank").select_option("1")
    notice.wait_for()
    assert visit.page.locator("#phases polygon").count() == 0
    visit.page.unroute_all()
    visit.page.locator("#rank").select_option("0")
    visit.page.locator("#phases polygon").first.wait_for()
    visit.page.locator("#notice").wait_for(state="hidden")
    assert not [complaint for complaint in visit.complaints if "503" not in complaint]


def test_the_heat_map_compares_a_rank_with_the_others(browser: Any, url: str) -> None:
    assert first_cell(browser, f"{url}/runs/picture") == (
        "rank 0, step 1\n30.0 ms shorter than the other ranks",
        "#0072b2",
    )


def test_the_heat_map_of_one_rank_says_nothing_of_others(browser: Any, url: str) -> None:
    put(url, msgspec.structs.replace(batch("alone", 0, slow=False, host="node"), world_size=1))
    assert first_cell(browser, f"{url}/runs/alone") == ("rank 0, step 1", "#888888")


def first_cell(browser: Any, address: str) -> tuple[str, str]:
    """What the heat map's first cell says when pointed at, and its colour."""
    visit = Visit(browser, address)
    cell = visit.page.locator("#heat rect.cell").first
    cell.hover()
    assert visit.complaints == []
    return visit.page.locator("#tip").inner_text(), cell.get_attribute("fill")
