"""Both pages in a real Chromium, fed by a real collector."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from typer.testing import CliRunner

from benchmarks.rig.collector import collector
from ddpobs import wire
from ddpobs.cli import main
from ddpobs.shared.quantities import duration, time_of_day, time_range
from tests.support.server import batches
from tests.support.server.browsing import EVIL, Visit, batch, paused_visit, put, settle


def test_the_list_shows_the_run_and_its_worst_finding(browser: Any, url: str) -> None:
    visit = Visit(browser, url)
    visit.page.get_by_text("Rank 1 is slow in backward").wait_for()
    expect(visit.page.get_by_role("link", name="picture")).to_have_attribute("href", "/runs/picture")
    expect(visit.page.locator("#runs .severity.critical")).to_have_count(1)
    expect(visit.page.locator("#runs .c-gain")).to_have_text(re.compile(r"^\d\d %$"))
    expect(visit.page.locator("#runs .c-step")).to_have_text("70 ms")
    expect(visit.page.locator("#runs .spark polyline")).to_have_count(1)
    assert visit.errors == []
    assert all(address.startswith(url) for address in visit.requests)


def test_the_list_sums_up_a_diagnosis_as_the_collector_does(browser: Any, tmp_path: Path) -> None:
    script = """async () => {
      const { diagnose, readRuns, state } = await import("/static/runs_state.js");
      await readRuns({ text: "", days: 0 }, true);
      const runs = [...state.runs.values()];
      for (const run of runs) run.diagnosis = null;
      await diagnose(runs, () => null);
      return Object.fromEntries(runs.map(({ run, diagnosis }) => [run, diagnosis]));
    }"""
    with collector(tmp_path, lost_after_s=3600, stalled_after_s=3600) as running:
        for rank in range(2):
            put(running.url, batch("slow", rank, slow=rank == 1, host="node"))
            put(running.url, batches.batch("short", rank=rank, steps=batches.steps(0, 3)))
        made = Visit(browser, f"{running.url}/fleet").page.evaluate(script)
        listed = httpx.get(f"{running.url}/api/v1/runs").json()["runs"]
    for name in ("summary", "worst", "severity", "code", "findings"):
        shown = {run: diagnosis[name] for run, diagnosis in made.items()}
        assert shown == {run["run"]: run["diagnosis"][name] for run in listed}, name
    assert made["short"]["summary"].startswith("Too ")
    assert made["slow"]["worst"] == "Rank 1 is slow in backward"


def test_the_page_prints_quantities_as_the_collector_does(browser: Any, url: str) -> None:
    times = [0, 400, 340_000, 3 * 10**7, 131_400_000, 999_600_000, 125 * 10**9, 12_000 * 10**9, 187_200 * 10**9]
    visit = Visit(browser, url)
    script = "async (all) => { const m = await import('/static/times.js'); return all.map(m.duration); }"
    assert visit.page.evaluate(script, times) == list(map(duration, times))
    began = 1_700_000_000 * 10**9
    ranges = [(began, began + length) for length in (0, *times[3:])]
    assert visit.page.evaluate(script.replace("m.duration", "(ends) => m.timeRange(...ends)"), ranges) == [
        time_range(*ends) for ends in ranges
    ]
    assert visit.page.evaluate(script.replace("m.duration", "m.clock"), [began]) == [time_of_day(began)]


def expect_width(visit: Visit, width: int) -> None:
    """Wait until nothing is wider than the window: charts follow its size later."""
    visit.page.wait_for_function("width => document.documentElement.scrollWidth === width", arg=width)


def test_the_pages_fit_the_width_of_a_window_and_of_a_phone(browser: Any, url: str) -> None:
    visit = Visit(browser, url)
    visit.page.get_by_text("Rank 1 is slow in backward").wait_for()
    for width in (1280, 1000, 720, 390):
        visit.page.set_viewport_size({"width": width, "height": 844})
        expect_width(visit, width)
    visit.page.wait_for_function("() => document.querySelector('#runs .c-finding .text')?.offsetWidth > 250")
    visit.page.get_by_role("link", name="picture").click()
    settle(visit)
    for width in (390, 320):
        visit.page.set_viewport_size({"width": width, "height": 844})
        expect_width(visit, width)


def test_the_list_requests_no_diagnosis_that_it_already_has(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        for rank in range(2):
            goodbye = [wire.Event(kind="goodbye", at_ns=0)]
            put(running.url, msgspec.structs.replace(batch("over", rank, rank == 1, "node"), events=goodbye))
        for _ in range(2):
            visit = Visit(browser, running.url)
            visit.page.get_by_text("Rank 1 is slow in backward").wait_for()
    assert not [address for address in visit.requests if "diagnostics" in address]


def test_a_run_without_steps_is_too_early_to_judge(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        put(running.url, batches.batch("begun"))
        for _ in range(2):  # First the list requests the diagnosis, then the list includes it.
            visit = Visit(browser, running.url)
            visit.page.locator("#runs td").get_by_text("Too early: 32 steps are needed, 0 are there.").wait_for()
        visit.page.get_by_role("link", name="begun").click()
        visit.page.get_by_role("heading", name="Too early: 32 steps are needed, 0 are there.").wait_for()
        settle(visit)
        expect(visit.page.locator("#selected")).to_be_hidden()


PULSES = {
    wire.Pulse(at_ns=0, phase="other", step=3): "other, step 3 (",
    wire.Pulse(at_ns=0, phase="exposed_comm", step=3, module=0, bucket=2): "exposed comm, step 3, bucket 0.2 (",
    wire.Pulse(at_ns=0, phase="backward", step=3, module=1, bucket=0): "backward, step 3, bucket 1.0 (",
}


def test_the_table_of_ranks_shows_the_current_phase_and_bucket(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        for rank, pulse in enumerate(PULSES):
            put(running.url, batches.batch("here", rank=rank, world_size=3, pulse=pulse))
        visit = Visit(browser, f"{running.url}/runs/here")
        for text in PULSES.values():
            visit.page.locator("#processes td").get_by_text(text).wait_for()


def test_the_list_has_how_many_steps_a_short_run_needs(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        put(running.url, batches.batch("short", steps=batches.steps(0, 10)))
        httpx.get(f"{running.url}/api/v1/runs/short/diagnostics")
        for _ in range(2):
            visit = Visit(browser, running.url)
            text = "Too early: 32 steps are needed, 10 are there."
            visit.page.locator("#runs td").get_by_text(text, exact=True).wait_for()


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with collector(tmp_path_factory.mktemp("many")) as running:
        for number in range(70):
            put(running.url, batches.batch(f"run-{number}"))
        yield running.url


def with_older_runs(browser: Any, address: str) -> Visit:
    """A visit to the list with its second page, requested by two clicks at the same time."""
    visit = paused_visit(browser)
    visit.page.goto(address)
    visit.page.get_by_role("button", name="Older runs").wait_for()
    visit.page.evaluate("for (const _ of [1, 2]) document.getElementById('more').click()")
    visit.page.locator("#runs tbody tr").nth(59).wait_for()
    return visit


def expect_listed(visit: Visit, names: list[str]) -> None:
    expect(visit.page.locator("#runs tbody a")).to_have_text(names)


def test_older_runs_are_added_once_and_stay_after_a_refresh(browser: Any, many_runs: str) -> None:
    visit = with_older_runs(browser, many_runs)
    newest_first = [f"run-{number}" for number in range(69, -1, -1)]
    expect_listed(visit, newest_first[:60])
    put(many_runs, batches.batch("run-69", seq=1, steps=batches.steps(0, 3)))
    visit.page.clock.run_for(15_000)
    visit.page.locator("#runs tbody tr").first.get_by_text("3", exact=True).wait_for()
    expect_listed(visit, newest_first[:60])
    visit.page.get_by_role("button", name="Older runs").click()
    visit.page.locator("#runs tbody tr").nth(69).wait_for()
    expect_listed(visit, newest_first)
    expect(visit.page.locator("#more")).to_be_hidden()
    assert visit.errors == []


def test_a_failed_refresh_is_shown_keeps_the_rows_and_is_repeated(browser: Any, many_runs: str) -> None:
    visit = with_older_runs(browser, many_runs)
    visit.page.route("**/api/v1/runs?*", lambda route: route.fulfill(status=503, json={"title": "Not ready"}))
    visit.page.clock.run_for(15_000)
    visit.page.get_by_text("Not ready; trying again.", exact=True).wait_for()
    expect(visit.page.locator("#runs tbody a")).to_have_count(60)
    visit.page.unroute_all()
    visit.page.clock.run_for(15_000)
    visit.page.locator("#notice").wait_for(state="hidden")
    expect(visit.page.locator("#runs tbody a")).to_have_count(60)
    assert not [error for error in visit.errors if "503" not in error]


def test_the_list_is_searched_filtered_and_sorted_by_its_address(browser: Any, many_runs: str) -> None:
    by_name = ["run-6", *(f"run-{number}" for number in range(60, 70))]
    visit = paused_visit(browser)
    visit.page.goto(many_runs)
    visit.page.locator("#runs tbody tr").first.wait_for()
    visit.page.get_by_role("searchbox").fill("RUN-6")
    expect_listed(visit, [f"run-{number}" for number in (*range(69, 59, -1), 6)])
    visit.page.get_by_role("button", name="Run", exact=True).click()
    expect_listed(visit, by_name)
    expect(visit.page).to_have_url(f"{many_runs}/?search=RUN-6&sort=run")
    visit.page.reload()
    expect_listed(visit, by_name)
    expect(visit.page.locator("th[data-key=run]")).to_have_attribute("aria-sort", "ascending")
    visit.page.locator("#state").select_option("failed")
    visit.page.get_by_text("No run matches.").wait_for()
    visit.page.get_by_role("button", name="Show all runs").click()
    expect(visit.page.locator("#runs tbody a")).to_have_count(30)
    assert visit.errors == []


def test_the_page_reads_only_the_runs_that_match_and_selects_across_searches(browser: Any, many_runs: str) -> None:
    visit = paused_visit(browser)
    visit.page.goto(f"{many_runs}/?search={'x' * 300}")
    visit.page.get_by_role("button", name="Show all runs").click()
    expect(visit.page.locator("#count")).to_have_text("70 runs")
    search = visit.page.get_by_role("searchbox")
    for number in (7, 68):
        search.fill(f"run-{number}")
        expect_listed(visit, [f"run-{number}"])
        expect(visit.page.locator("#count")).to_have_text("1 of 70 runs")
        visit.page.get_by_role("checkbox", name=f"Select run-{number}").check()
    assert {parse_qs(urlsplit(url).query)["limit"][0] for url in visit.requests if "/runs?" in url} == {"30"}
    search.fill("")
    expect_listed(visit, [f"run-{number}" for number in range(69, 39, -1)])
    expect(visit.page.locator("#runs input:checked")).to_have_count(1)
    visit.page.get_by_role("button", name="Compare (2 of 2)").click()
    visit.page.wait_for_url(f"{many_runs}/compare?a=run-7&b=run-68")
    assert visit.errors == []


def test_tags_are_edited_and_runs_appear_and_are_deleted_without_a_reload(browser: Any, many_runs: str) -> None:
    visit = paused_visit(browser)
    visit.page.goto(f"{many_runs}/?search=fresh")
    visit.page.get_by_text("No run matches.").wait_for()
    put(many_runs, batches.batch("fresh"))
    visit.page.clock.run_for(3000)
    visit.page.get_by_role("link", name="fresh").wait_for()
    visit.page.get_by_role("button", name="Edit tags and note of fresh").click()
    visit.page.get_by_role("textbox", name="Tags").fill(f"nightly, {EVIL[:20]}")
    visit.page.get_by_role("textbox", name="Note").fill("first try")
    visit.page.get_by_role("button", name="Save").click()
    visit.page.locator("dialog").wait_for(state="detached")
    expect(visit.page.locator("#runs .tag")).to_have_text(["#nightly", f"#{EVIL[:20]}"])
    expect(visit.page.locator("#runs .note")).to_have_text("first try")
    visit.page.get_by_role("searchbox").fill("#nightly")
    expect_listed(visit, ["fresh"])
    visit.page.get_by_role("checkbox", name="Select fresh").check()
    visit.page.get_by_role("button", name="Delete (1)").click()
    visit.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    visit.page.get_by_text("No run matches.").wait_for()
    assert httpx.get(f"{many_runs}/api/v1/runs/fresh").status_code == 404
    assert visit.errors == []


def test_the_comparison_with_an_unknown_run_names_it(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/compare?a=picture&b=nowhere")
    visit.page.wait_for_load_state("networkidle")  # The names of runs are suggested after the comparison.
    expect(visit.page.get_by_role("status")).to_have_text("no run nowhere has reported here")


def test_two_runs_of_the_list_are_compared(browser: Any, url: str) -> None:
    for rank in range(2):
        put(url, batch("steady", rank, slow=False, host="node"))
    visit = Visit(browser, url)
    visit.page.get_by_role("link", name="steady").wait_for()
    listed_page = Axe().run(visit.page)
    assert listed_page.violations_count == 0, listed_page.generate_report()
    for name in ("picture", "steady"):
        visit.page.get_by_role("checkbox", name=f"Select {name}").check()
    visit.page.get_by_role("button", name="Compare (2 of 2)").click()
    visit.page.wait_for_url(f"{url}/compare?a=picture&b=steady")
    visit.page.locator("#times tbody tr").first.wait_for()
    verdict = visit.page.locator("#times tr", has_text="backward").locator(".verdict")
    expect(verdict).to_have_text(re.compile("^faster by"))
    expect(visit.page.get_by_role("link", name="open steady")).to_have_attribute("href", re.compile("^runs/steady"))
    visit.page.get_by_text("50 and 50 typical steps are compared.").wait_for()
    visit.page.get_by_role("heading", name="and one of 0.0 % would have been").wait_for()
    went = visit.page.locator("#findings div", has_text="Only in picture")
    went.get_by_text("Rank 1 is slow in backward").wait_for()
    visit.page.get_by_role("button", name="Exchange both runs").click()
    visit.page.wait_for_url(f"{url}/compare?a=steady&b=picture")
    visit.page.get_by_text("Only in picture").wait_for()
    visit.page.emulate_media(forced_colors="active")
    assert Axe().run(visit.page).violations_count == 0
    color = "getComputedStyle(document.querySelector('.swatch.data')).backgroundColor"
    assert visit.page.evaluate(color) == "rgb(230, 159, 0)"
    assert visit.errors == []
    for width in (390, 320):
        visit.page.set_viewport_size({"width": width, "height": 844})
        expect_width(visit, width)


def test_an_interval_beyond_the_axis_has_an_arrow_there_and_the_head_states_the_axis(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/compare")
    script = """async () => {
        const { showChanges } = await import("/static/changes.js");
        const change = (low_ratio, change_ratio, high_ratio) => {
          const times = { kind: "phase", name: "data", a_ns: 1, b_ns: 1, smallest_ratio: 0 };
          return { ...times, low_ratio, change_ratio, high_ratio };
        };
        const changes = [change(-0.9, 0.4, 1.7), change(-0.9, 0.4, 8), change(1, 5, 8)];
        const table = document.getElementById("times");
        showChanges(table, changes);
        const counts = Array.from(table.querySelectorAll("svg"), (drawing) => {
          return [drawing.querySelectorAll(".arrow").length, drawing.querySelectorAll("circle").length];
        });
        return [table.querySelector("th.interval-of").textContent, ...counts];
    }"""
    assert visit.page.evaluate(script) == ["Interval, \u2212200 % to +200 %", [0, 1], [1, 1], [1, 0]]


def test_the_fleet_page_sums_up_the_runs(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        for rank in range(2):
            put(running.url, batch("over", rank, slow=rank == 1, host=EVIL))
        assert httpx.get(f"{running.url}/api/v1/runs/over/diagnostics").status_code == 200
        while not httpx.get(f"{running.url}/api/v1/fleet").json()["by_host"]:
            time.sleep(0.2)
        visit = Visit(browser, f"{running.url}/fleet?weeks=4")
        visit.page.locator("#by_host td").get_by_text(EVIL).wait_for()
        expect(visit.page.locator("#summary")).to_have_text(re.compile("^1 run took "))
        expect(visit.page.locator("#slow-hosts li")).to_have_count(0)
        expect(visit.page.locator("#slow-note")).to_have_text("Not known: no run has several hosts to compare.")
        expect(visit.page.locator("#unknown-regression")).to_be_visible()
        visit.page.set_viewport_size({"width": 390, "height": 844})
        broken = "[...document.querySelectorAll('#by_host th')].filter((head) => head.offsetHeight > 70).length"
        assert visit.page.evaluate(broken) == 0  # No heading is broken within a word.
        visit.page.set_viewport_size({"width": 1280, "height": 1000})
        expect(visit.page.locator("#no-regression")).to_be_hidden()
        assert visit.errors == []
        fleet = httpx.get(f"{running.url}/api/v1/fleet").json()
        tiny = {"title": "next to nothing", "hours": 1e-9, "share": 1e-9}
        fleet |= {"compared_runs": 1, "causes": [tiny, tiny | {"title": "much", "share": 0.5}]}
        fleet["by_week"][0]["rank_hours"] = 1e-9
        visit.page.route("**/api/v1/fleet?*", lambda route: route.fulfill(json=fleet))
        visit.page.reload()
        expect(visit.page.locator("#slow-note")).to_have_text(re.compile("the hosts of 1 run were compared"))
        expect(visit.page.locator("#by_week")).to_contain_text("under 0.0001")
        expect(visit.page.locator("#causes tbody td:first-child")).to_have_text(["much"])
        fleet |= {"runs": 0, "causes": []}
        visit.page.reload()
        expect(visit.page.locator("#summary")).to_have_text("No run in these weeks.")
        expect(visit.page.locator("#causes")).to_be_hidden()
        printed = CliRunner().invoke(main, ["fleet", "--tag", "of-no-run", "--collector", running.url])
        assert printed.output.startswith("no run in 12 weeks\n")
        printed = CliRunner().invoke(main, ["fleet", "--collector", running.url])
        assert printed.exit_code == 0, printed.output
        assert EVIL in printed.output
