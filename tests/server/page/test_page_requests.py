"""The pages' requests and their frequency, their reaction to refusals, and the security policy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from benchmarks.rig.collector import collector
from ddpobs import wire
from tests.support.server import batches
from tests.support.server.browsing import EVIL, Visit, batch, paused_visit, put, settle
from tests.support.server.tokens import create_token


@pytest.mark.parametrize(("state", "every_s"), [("running", 5), ("stalled", 5), ("lost", 15)])
def test_a_run_is_refreshed_until_it_is_finished(browser: Any, tmp_path: Path, state: str, every_s: int) -> None:
    limit: dict[str, Any] = {} if state == "running" else {f"{state}_after_s": 0.001}
    with collector(tmp_path, **limit) as running:
        put(running.url, batch("long", 0, slow=False, host="node"))
        visit = paused_visit(browser)
        visit.page.goto(f"{running.url}/runs/long")
        settle(visit)
        facts = visit.page.locator("#facts")
        expect(facts).to_have_text(re.compile(f"^{state}"))
        put(running.url, batches.batch("long", seq=1, events=[wire.Event(kind="goodbye", at_ns=0)]))
        reads = visit.reads()
        visit.page.clock.run_for(every_s * 1000 - 1)
        assert visit.reads() == reads
        with visit.page.expect_response("**/figures/buckets*"):  # The last request of a refresh.
            visit.page.clock.run_for(1)
        expect(facts).to_have_text(re.compile("^finished"))
        settle(visit)
        reads = visit.reads()
        visit.page.clock.run_for(60_000)
        assert visit.reads() == reads
        assert visit.errors == []


@pytest.mark.parametrize("where", ["", "/runs/picture"])
@pytest.mark.parametrize(
    ("answer", "notice"),
    [
        ({"status": 503, "json": {"title": "Storage unavailable", "detail": "x"}}, "Storage unavailable"),
        ({"status": 429, "json": {"title": "Too many wrong tokens"}}, "Too many wrong tokens"),
        ({"status": 502, "body": "<h1>Bad Gateway</h1>", "content_type": "text/html"}, "HTTP 502"),
    ],
)
def test_a_temporary_failure_is_shown_and_the_request_repeated(
    browser: Any, url: str, where: str, answer: dict[str, Any], notice: str
) -> None:
    visit = paused_visit(browser)
    visit.page.route("**/api/v1/**", lambda route: route.fulfill(**answer))
    visit.page.goto(url + where)
    visit.page.get_by_text(f"{notice}; trying again.").wait_for()
    visit.page.unroute_all()
    visit.page.clock.run_for(15_000)
    visit.page.get_by_text("Rank 1 is slow in backward").wait_for()
    visit.page.locator("#notice").wait_for(state="hidden")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_shown_and_ends_the_refreshes(browser: Any, url: str, status: int) -> None:
    visit = paused_visit(browser)
    visit.page.route("**/api/v1/**", lambda route: route.fulfill(status=status, json={"detail": "not for you"}))
    visit.page.goto(url)
    notice = "not for you" if status == 404 else "not for you. Reload the page to enter a token."
    visit.page.get_by_text(notice, exact=True).wait_for()
    reads = visit.reads()
    visit.page.clock.run_for(60_000)
    assert visit.reads() == reads


def test_names_of_clients_are_shown_as_text_only(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/picture")
    visit.page.locator("#unused li").get_by_text("<img").wait_for()
    visit.page.locator("#findings").get_by_text(f"{EVIL} of {EVIL}").wait_for()
    visit.page.locator("#processes td").get_by_text(EVIL).first.wait_for()
    expect(visit.page.locator("img")).to_have_count(0)
    assert "owned" not in visit.page.title()


@pytest.mark.parametrize(("where", "holds"), [("/runs/create_token", "traceEvents"), ("", "# HELP")])
def test_with_a_token_a_link_downloads_its_target(browser: Any, tmp_path: Path, where: str, holds: str) -> None:
    with collector(tmp_path, token="s3cret") as guarded:
        put(guarded.url, batch("create_token", 0, slow=False, host="node"), Authorization="Bearer s3cret")
        visit = Visit(browser, guarded.url + where, "s3cret")
        visit.page.get_by_text("create_token").first.wait_for()
        if where:
            settle(visit)
            visit.page.get_by_role("button", name="trace").click()
        with visit.page.expect_download() as saved:
            visit.page.get_by_role("link", name="Save the file" if where else "metrics", exact=True).click()
        assert holds in saved.value.path().read_text()
        assert not [error for error in visit.errors if "401" not in error]


def test_a_token_without_read_is_discarded_and_the_next_one_requested(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path, token="s3cret") as guarded:
        put(guarded.url, batch("create_token", 0, slow=False, host="node"), Authorization="Bearer s3cret")
        database = f"sqlite:///{guarded.database}"
        visit = Visit(browser, guarded.url, create_token(database, "ranks", "default", "ingest"))
        notice = "this request needs the scope read, and the token has ingest. Reload the page to enter a token."
        visit.page.get_by_text(notice, exact=True).wait_for()
        assert "the token has ingest" in visit.prompts[1]
        visit = Visit(browser, guarded.url, "wrong", create_token(database, "more", "default", "ingest"), "s3cret")
        visit.page.get_by_role("link", name="create_token").wait_for()
        visit.page.reload()
        visit.page.get_by_role("link", name="create_token").wait_for()
        assert len(visit.prompts) == 3


def test_without_a_token_the_page_shows_how_to_enter_one(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path, token="s3cret") as guarded:
        visit = Visit(browser, guarded.url)
        visit.page.get_by_text("Reload the page to enter a token.").wait_for()
    assert visit.prompts == ["This collector needs a token with the scope read:"]


def test_an_unknown_run_is_shown_as_such(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/nobody")
    visit.page.get_by_text("no run nobody has reported here").wait_for()


def test_the_documentation_loads_only_files_of_the_collector(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/docs")
    health = visit.page.locator(".opblock-get", has_text="/healthz")
    health.locator(".opblock-summary-control").click()
    health.get_by_role("button", name="Try it out").click()
    with visit.page.expect_response(f"{url}/healthz"):
        health.get_by_role("button", name="Execute").click()
    assert all(address.startswith((url, "data:")) for address in visit.requests)
    assert visit.errors == []


def test_the_pages_policy_denies_everything_by_default(url: str) -> None:
    policy = httpx.get(url).headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("where", ["/", "/runs/picture", "/static/run.js", "/swagger/swagger-ui.css", "/docs"])
def test_a_browser_revalidates_the_pages_files(url: str, where: str) -> None:
    assert httpx.get(url + where).headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize("where", ["/api/v1/runs", "/api/v1/runs/picture/ranks", "/api/v1/runs/nobody", "/metrics"])
def test_a_browser_does_not_store_data_of_runs(url: str, where: str) -> None:
    assert httpx.get(url + where).headers["Cache-Control"] == "no-store"


def test_a_page_without_runs_shows_how_to_start_one(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path) as empty:
        visit = Visit(browser, empty.url)
        visit.page.get_by_text("ddpobs run --collector").wait_for()
