"""What the pages ask for and how often, what they make of a refusal, and what a browser may do there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ddpobs import wire
from tests.collector import collector
from tests.server import batches
from tests.server.browsing import EVIL, Visit, batch, held, put
from tests.server.web.test_auth import kept


@pytest.mark.parametrize(("state", "every_s"), [("running", 5), ("stalled", 5), ("lost", 15)])
def test_a_run_is_asked_for_until_it_is_finished(browser: Any, tmp_path: Path, state: str, every_s: int) -> None:
    limit = {} if state == "running" else {f"{state}_after_s": 0.001}
    with collector(tmp_path, **limit) as running:
        put(running.url, batch("long", 0, slow=False, host="node"))
        visit = held(browser)
        visit.page.goto(f"{running.url}/runs/long")
        visit.page.locator("#timeline rect.comm").first.wait_for()
        facts = visit.page.locator("#facts")
        assert facts.inner_text().startswith(state)
        put(running.url, batches.batch("long", seq=1, events=[wire.Event(kind="goodbye", at_ns=0)]))
        reads = visit.reads()
        visit.page.clock.run_for(every_s * 1000 - 1)
        assert visit.reads() == reads
        with visit.page.expect_response("**/spans*"):  # What it asks for last.
            visit.page.clock.run_for(1)
        assert facts.inner_text().startswith("finished")
        reads = visit.reads()
        visit.page.clock.run_for(60_000)
        assert visit.reads() == reads
        assert visit.complaints == []


@pytest.mark.parametrize("where", ["", "/runs/picture"])
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 503, "json": {"title": "Storage unavailable", "detail": "x"}}, "Storage unavailable"),
        ({"status": 429, "json": {"title": "Too many wrong tokens"}}, "Too many wrong tokens"),
        ({"status": 502, "body": "<h1>Bad Gateway</h1>", "content_type": "text/html"}, "HTTP 502"),
    ],
)
def test_an_answer_that_says_not_now_is_told_and_asked_for_again(
    browser: Any, url: str, where: str, answer: dict[str, Any], said: str
) -> None:
    visit = held(browser)
    visit.page.route("**/api/v1/**", lambda route: route.fulfill(**answer))
    visit.page.goto(url + where)
    visit.page.get_by_text(f"{said}; trying again.").wait_for()
    visit.page.unroute_all()
    visit.page.clock.run_for(15_000)
    visit.page.get_by_text("Rank 1 is slow in backward").wait_for()
    visit.page.locator("#notice").wait_for(state="hidden")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_told_and_ends_the_asking(browser: Any, url: str, status: int) -> None:
    visit = held(browser)
    visit.page.route("**/api/v1/**", lambda route: route.fulfill(status=status, json={"detail": "not for you"}))
    visit.page.goto(url)
    told = "not for you" if status == 404 else "not for you. Reload the page to give a token."
    visit.page.get_by_text(told, exact=True).wait_for()
    reads = visit.reads()
    visit.page.clock.run_for(60_000)
    assert visit.reads() == reads


def test_names_that_clients_chose_are_text_and_nothing_else(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/picture")
    visit.page.locator("#unused li").get_by_text("<img").wait_for()
    visit.page.get_by_role("heading", name=f"{EVIL} of {EVIL}").wait_for()
    visit.page.locator("#ranks td").get_by_text(EVIL).first.wait_for()
    assert visit.page.locator("img").count() == 0
    assert "owned" not in visit.page.title()


@pytest.mark.parametrize(
    ("where", "link", "holds"), [("/runs/kept", "trace", "traceEvents"), ("", "metrics", "# HELP")]
)
def test_with_a_token_a_link_saves_what_it_leads_to(
    browser: Any, tmp_path: Path, where: str, link: str, holds: str
) -> None:
    with collector(tmp_path, token="s3cret") as guarded:
        put(guarded.url, batch("kept", 0, slow=False, host="node"), Authorization="Bearer s3cret")
        visit = Visit(browser, guarded.url + where, "s3cret")
        visit.page.get_by_text("kept").first.wait_for()
        with visit.page.expect_download() as saved:
            visit.page.get_by_role("link", name=link).click()
        assert holds in saved.value.path().read_text()
        assert not [complaint for complaint in visit.complaints if "401" not in complaint]


def test_a_token_that_may_not_read_is_forgotten_and_another_one_asked_for(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path, token="s3cret") as guarded:
        put(guarded.url, batch("kept", 0, slow=False, host="node"), Authorization="Bearer s3cret")
        database = f"sqlite:///{guarded.database}"
        visit = Visit(browser, guarded.url, kept(database, "ranks", "default", "ingest"))
        told = "this token may ingest, and this needs read. Reload the page to give a token."
        visit.page.get_by_text(told, exact=True).wait_for()
        assert "this token may ingest" in visit.asked[1]
        visit = Visit(browser, guarded.url, "wrong", kept(database, "more", "default", "ingest"), "s3cret")
        visit.page.get_by_role("link", name="kept").wait_for()
        visit.page.reload()
        visit.page.get_by_role("link", name="kept").wait_for()
        assert len(visit.asked) == 3


def test_who_gives_no_token_is_told_how_to_give_one(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path, token="s3cret") as guarded:
        visit = Visit(browser, guarded.url)
        visit.page.get_by_text("Reload the page to give a token.").wait_for()
    assert visit.asked == ["This collector wants a token that may read:"]


def test_an_unknown_run_says_so(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/nobody")
    visit.page.get_by_text("no run nobody has reported here").wait_for()


def test_the_documentation_loads_nothing_from_elsewhere(browser: Any, url: str) -> None:
    visit = Visit(browser, f"{url}/docs")
    health = visit.page.locator(".opblock-get").first
    health.locator(".opblock-summary-control").click()
    health.get_by_role("button", name="Try it out").click()
    with visit.page.expect_response(f"{url}/healthz"):
        health.get_by_role("button", name="Execute").click()
    assert all(address.startswith((url, "data:")) for address in visit.requests)
    assert visit.complaints == []


def test_the_page_forbids_what_it_does_not_need(url: str) -> None:
    policy = httpx.get(url).headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("where", ["/", "/runs/picture", "/static/run.js", "/swagger/swagger-ui.css", "/docs"])
def test_the_pages_files_are_asked_about_before_they_are_used_again(url: str, where: str) -> None:
    assert httpx.get(url + where).headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize("where", ["/api/v1/runs", "/api/v1/runs/picture/ranks", "/api/v1/runs/nobody", "/metrics"])
def test_nobody_keeps_what_is_told_of_runs(url: str, where: str) -> None:
    assert httpx.get(url + where).headers["Cache-Control"] == "no-store"


def test_a_page_without_runs_says_how_to_start_one(browser: Any, tmp_path: Path) -> None:
    with collector(tmp_path) as empty:
        visit = Visit(browser, empty.url)
        visit.page.get_by_text("ddpobs run --collector").wait_for()
