"""The page of runs that hang, fail or were restarted, in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any

import httpx
import pytest
from ddpobs_server.figures.report_page import report_page
from playwright.sync_api import expect

from benchmarks.rig.collector import collector
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, hello, layout, pulse, put, steps
from tests.support.server.browsing import EVIL, Visit, settle

NEXT = "b" * 16


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run that hangs, and a run whose first attempt failed."""
    with collector(tmp_path_factory.mktemp("failures"), lost_after_s=3600, stalled_after_s=3600) as running:
        waiting = pulse("bucket", 12, bucket=1)
        blocked = pulse(
            "data", 14, phase="data", place=f"data.py:31 {EVIL}", stack=["train.py:5 main", f"data.py:31 {EVIL}"]
        )
        for rank, activity in enumerate((waiting, blocked)):
            put(
                running.url,
                batch("hung", 0, rank, hello=hello(), layouts=[layout()], steps=steps(0, 5), pulse=activity),
            )
        end = wire.Event(kind="terminated", at_ns=0, step=7, detail={"signal": "SIGTERM", "wall_ns": 10**18})
        put(running.url, batch("killed", 0, 0, world_size=1, steps=steps(0, 5), pulse=blocked, events=[end]))
        detail: dict[str, wire.Scalar] = {"error": "ValueError", "message": f"a bad sample {EVIL}", "phase": "forward"}
        detail |= {"traceback": "File train.py\nline 7", "wall_ns": 1}
        failed = wire.Event(kind="failed", at_ns=0, step=6, detail=detail)
        put(running.url, batch("again", 0, 0, steps=steps(0, 7)))
        put(running.url, batch("again", 0, 1, steps=steps(0, 7), events=[failed]))
        for rank in range(2):
            later = {
                "attempt": NEXT,
                "source": f"{16 + rank:016x}",
                "anchor": wire.Anchor(wall_ns=10**18 + 1, monotonic_ns=0),
            }
            put(running.url, batch("again", 0, rank, steps=steps(0, 3), **later))
            for attempt in ({}, later):
                put(running.url, batch("same", 0, rank, steps=steps(0, 7), events=[failed] * rank, **attempt))
        command: dict[str, wire.Scalar] = {"stage": "command", "exit_status": 2, "wall_ns": 1}
        command |= {"output": f"usage:\nno such option {EVIL}"}
        ended = wire.Event(kind="failed", at_ns=0, detail=command)
        put(running.url, batch("command", 0, 0, world_size=1, events=[ended]))
        goodbye = wire.Event(kind="goodbye", at_ns=0, step=3)
        for rank in range(2):
            put(running.url, batch("twice", 0, rank, steps=steps(0, 3), events=[goodbye]))
            later = {"attempt": NEXT, "source": f"{16 + rank:016x}"}
            put(running.url, batch("twice", 0, rank, steps=steps(0, 5), **later))
        yield running.url


def color(visit: Visit, selector: str) -> str:
    script = "selector => getComputedStyle(document.querySelector(selector)).backgroundColor"
    return str(visit.page.evaluate(script, selector))


def test_the_list_marks_a_run_that_hangs(browser: Any, url: str) -> None:
    visit = Visit(browser, url)
    visit.page.locator("#runs .state.hung").wait_for()
    visit.page.locator("#runs").get_by_text("The run hangs in step 7").wait_for()
    assert color(visit, "#runs .state.hung") != color(visit, "#runs .state.running")
    assert visit.errors == []


def test_the_page_of_a_run_that_hangs_shows_place_and_stack(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/hung")
    visit.page.get_by_role("heading", name="The run hangs in step 7").wait_for()
    visit.page.locator("#findings").get_by_text(re.compile(r"^rank 1 has been in the data loader for 1\d s")).wait_for()
    visit.page.locator("#facts .state.hung").wait_for()
    stack = re.escape(f"Rank 1:\n  train.py:5 main\n  data.py:31 {EVIL}")
    expect(visit.page.locator("#findings pre")).to_have_text(re.compile(f"^{stack}\\s*$"))
    cell = f"stuck for 14 s at data.py:31 {EVIL}: data, step 7, bucket 0.0 ("
    expect(visit.page.locator("#processes td.hung").nth(1)).to_have_text(re.compile(f"^{re.escape(cell)}"))
    expect(visit.page.locator("#attempts tbody tr")).to_have_count(1)
    settle(visit)
    after = re.compile(r"One finding is after these steps\.$")
    expect(visit.page.locator("#figure-phases .summary")).to_have_text(after)
    assert visit.errors == []
    expect(visit.page).to_have_title("hung · ddpobs")


def test_a_rank_that_was_ended_while_it_was_stuck_keeps_its_place(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/killed")
    cell = re.escape(f"stuck at data.py:31 {EVIL}, then ended by SIGTERM (")
    expect(visit.page.locator("#processes td.failed")).to_have_text(re.compile(f"^{cell}"))
    assert visit.errors == []


def test_a_command_in_a_text_is_shown_as_code(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/hung")
    script = """async () => {
        const { factRows } = await import("/static/elements.js");
        return factRows([["do", "Run `a <b>` or `c`; not `d"]])[1].innerHTML;
    }"""
    assert visit.page.evaluate(script) == "Run <code>a &lt;b&gt;</code> or <code>c</code>; not `d"


def test_the_page_switches_between_attempts(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/again")
    visit.page.locator("#facts").get_by_text("3 steps · attempt 2 of 2").wait_for()
    rows = visit.page.locator("#attempts tbody tr")
    rows.nth(1).wait_for()
    reason = f"rank 1: ValueError: a bad sample {EVIL}, in forward of step 6"
    expect(rows.nth(1).locator("td").nth(2)).to_have_text(reason)
    restart = f"This attempt is a restart: attempt 1 failed after 7 steps; {reason}."
    expect(visit.page.locator("#restarted")).to_have_text(restart)
    visit.page.get_by_role("link", name="attempt 1").click()
    visit.page.get_by_role("heading", name="Rank 1 failed in forward of step 6").wait_for()
    visit.page.locator("#facts").get_by_text("7 steps · attempt 1 of 2").wait_for()
    expect(visit.page.locator("#facts .state")).to_have_text("failed")
    expect(visit.page.locator("#findings pre")).to_have_text(re.compile(r"^File train\.py\nline 7\s*$"))
    expect(visit.page).to_have_url(f"{url}/runs/again?attempt=1")
    reads = [address for address in visit.requests if "/diagnostics" in address]
    assert [address for address in reads if f"attempt={ATTEMPT}" in address]
    visit.page.get_by_role("link", name="attempt 2").click()
    visit.page.locator("#facts").get_by_text("3 steps · attempt 2 of 2").wait_for()
    expect(visit.page).to_have_url(f"{url}/runs/again")
    assert visit.errors == []


def test_a_restart_that_the_same_error_ended_gives_it_once(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/same")
    restart = "This attempt is a restart: attempt 1 failed after 7 steps with the same error."
    expect(visit.page.locator("#restarted")).to_have_text(restart)
    visit.page.locator("#findings").get_by_text("the same error ended 2 attempts").wait_for()
    assert visit.errors == []


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (f"again/report.html?attempt={ATTEMPT}", "<pre>File train.py\nline 7</pre>"),
        ("hung/report.html", f"<pre>Rank 1:\n  train.py:5 main\n  data.py:31 {escape(EVIL)}</pre>"),
        ("command/report.html", f"<pre>usage:\nno such option {escape(EVIL)}</pre>"),
    ],
    ids=["crash", "hang", "command"],
)
def test_the_html_report_shows_a_traceback_and_stacks_as_they_are(run: str, text: str, url: str) -> None:
    assert text in httpx.get(f"{url}/api/v1/runs/{run}").text


def test_the_html_report_of_a_run_without_a_step_has_a_sentence_in_place_of_empty_figures(url: str) -> None:
    html = httpx.get(f"{url}/api/v1/runs/command/report.html").text
    assert html.count("<dt>steps</dt><dd>0</dd>") == 1  # No finding is of a step.
    assert html.count("<p>No step was recorded, so the figures of steps are left out.</p>") == 1
    assert re.findall(r"<h2>(.*?)</h2>", html)[1:] == ["Ranks", "Attempts"]


def test_the_html_report_sets_code_apart() -> None:
    nothing: dict[str, Any] = {"findings": [], "missing": [], "summary": "", "steps_seen": 0}
    html, _ = report_page("r", "http://c/runs/r", {"do": "`ddpobs push <x>`; wait"}, nothing, [], tables=[])
    assert "<dd><code>ddpobs push &lt;x&gt;</code>; wait</dd>" in html


def test_a_command_s_end_and_last_lines_are_on_the_page_and_no_rank_failed(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/command")
    visit.page.get_by_text("The command ended with exit status 2 before any rank joined").first.wait_for()
    visit.page.locator("pre", has_text=f"no such option {EVIL}").wait_for(state="attached")
    expect(visit.page.locator(".finding details > summary")).to_have_text("Evidence")  # It has no step.
    (attempt,) = httpx.get(f"{url}/api/v1/runs/command/attempts").json()["attempts"]
    assert (attempt["outcome"], attempt["first_rank"]) == ("failed", None)
    assert attempt["reason"] == "the command ended with exit status 2 before any rank joined"
    assert visit.errors == []


def test_a_training_after_an_orderly_end_is_no_restart(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/twice")
    visit.page.get_by_text("This attempt is another training: attempt 1 finished after 3 steps.", exact=True).wait_for()
    assert visit.errors == []


def test_an_unknown_attempt_is_shown_as_such(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/again?attempt={'c' * 16}")
    visit.page.get_by_text(f"run again has no attempt {'c' * 16}").wait_for()


def test_a_run_without_a_step_shows_no_empty_figures_and_no_empty_settings(browser: Any, url: str) -> None:
    put(
        url,
        batch(
            "command", 1, 0, world_size=1, hello=wire.Hello(host="node", pid=1, device="", backend="gloo", versions={})
        ),
    )
    visit = Visit(browser, f"{url}/runs/command")
    settle(visit)
    for selector in ("#selection", "#selected", "#whatif", ".finding .quiet"):
        expect(visit.page.locator(selector)).to_be_hidden()
    expect(visit.page.locator("#settings dt")).to_have_text(["backend"])
    assert visit.errors == []
    put(url, batch("command", 2, 0, world_size=1, steps=steps(0, 3)))
    visit = Visit(browser, f"{url}/runs/command")
    settle(visit)
    expect(visit.page.locator("#figure-phases")).to_be_visible()


def test_a_run_of_one_step_and_one_rank_offers_no_order_and_no_other_step(browser: Any, url: str) -> None:
    put(url, batch("single", 0, 0, world_size=1, steps=steps(0, 1)))
    visit = Visit(browser, f"{url}/runs/single")
    settle(visit)
    for selector in ("#order", "#previous", "#next"):
        expect(visit.page.locator(selector)).to_be_hidden()
    visit = Visit(browser, f"{url}/runs/hung")
    settle(visit)
    expect(visit.page.locator("#next")).to_be_visible()
    assert visit.errors == []
