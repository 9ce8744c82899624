"""Both pages in a real Chromium, fed by a real collector."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from ddpobs import wire
from tests.collector import collector
from tests.server import batches
from tests.server.analysis.scenario import changed
from tests.server.test_tokens import kept

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
EVIL = "<img src=x onerror=document.title='owned'>"
STEPS, MS = 60, 1_000_000


def batch(run: str, rank: int, slow: bool, host: str) -> wire.Batch:
    """Sixty steps of two buckets; the slow rank computes 30 ms longer in backward, and the other one waits for it."""
    step = np.arange(STEPS)
    zero = step * 0
    backward, exposed = (50 * MS, 2 * MS) if slow else (20 * MS, 32 * MS)
    start = 10**12 * (rank + 1) + step * 70 * MS
    known = np.where(step == 0, wire.UNKNOWN, 1)
    own_backward = np.where(step == 0, wire.UNKNOWN, backward)
    steps = wire.Steps(
        step=step,
        collective=step,
        start_ns=start,
        end_ns=start + 70 * MS,
        data_ns=zero + MS,
        forward_ns=zero + 10 * MS,
        backward_ns=zero + backward,
        exposed_comm_ns=zero + exposed,
        optimizer_ns=zero + 2 * MS,
        other_ns=zero + 70 * MS - 13 * MS - backward - exposed,
        own_ns=np.where(step == 0, wire.UNKNOWN, backward + 13 * MS),
        own_data_ns=known * MS,
        own_forward_ns=known * 10 * MS,
        own_backward_ns=own_backward,
        own_optimizer_ns=known * 2 * MS,
        own_other_ns=np.where(step == 0, wire.UNKNOWN, 0),
        comm_ns=zero + exposed,
        micro_steps=zero + 1,
        samples=zero + 8,
        flags=np.where(step == 0, wire.SYNCHRONISED | wire.NO_ORIGIN, wire.SYNCHRONISED),
    )
    begun = np.repeat(start + 11 * MS, 2)
    bucket = np.tile([0, 1], STEPS)
    ready = begun + np.where(bucket == 0, backward - 5 * MS, backward)
    spans = wire.Spans(
        step=np.repeat(step, 2),
        module=bucket * 0,
        revision=bucket * 0,
        bucket=bucket,
        ready_ns=ready,
        launched_ns=ready,
        started_ns=bucket * 0 + wire.UNKNOWN,
        done_ns=begun + 52 * MS + bucket,
    )
    layout = [
        wire.Bucket(size_bytes=4, dtype="float32", parameters=[wire.Parameter(name=name, size=1)])
        for name in ("head.weight", EVIL)
    ]
    return wire.Batch(
        version=1,
        run=run,
        attempt="a" * 16,
        source=f"{rank:016x}",
        seq=0,
        rank=rank,
        world_size=2,
        emitted=STEPS * 3,
        dropped=0,
        anchor=wire.Anchor(wall_ns=10**18, monotonic_ns=10**12),
        hello=wire.Hello(host=host, pid=1, device=host, backend=host, versions={"torch": host}, settings={host: host}),
        layouts=[wire.Layout(module=0, name=EVIL, revision=0, comm="all_reduce", buckets=layout)],
        steps=steps,
        spans=spans,
        unused=[wire.Unused(step=3, module=0, locally=[EVIL], globally=[])] if slow else [],
        events=[wire.Event(kind="sampler_without_set_epoch", at_ns=0, detail={"sampler": EVIL, "dataset": EVIL})],
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with collector(tmp_path_factory.mktemp("page")) as running:
        for rank in range(2):
            put(running.url, batch("picture", rank, slow=rank == 1, host=EVIL))
        yield running.url


def put(url: str, sent: wire.Batch, client: Any = httpx, **headers: str) -> None:
    answer = client.put(
        f"{url}/api/v1/runs/{sent.run}/sources/{sent.source}/batches/{sent.seq}",
        content=wire.encode(sent),
        headers={"Content-Type": wire.MSGPACK, **headers},
    )
    assert answer.status_code == 201, answer.text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        reason = "chromium is not installed: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield started
        started.close()


class Visit:
    """A page, what it asked for and what it complained of; asked for a token, it gives the next of these."""

    def __init__(self, browser: Any, address: str, *tokens: str) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 1000})
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.asked: list[str] = []
        self._tokens = iter(tokens)
        self.page.on("dialog", self._give_token)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        self.page.goto(address)

    def _give_token(self, dialog: Any) -> None:
        self.asked.append(dialog.message)
        dialog.accept(next(self._tokens, ""))

    def reads(self) -> int:
        """How often it asked the REST: a request of ours is told of after all that came before."""
        self.page.evaluate("fetch('/healthz').then(() => 0)")
        return sum("/api/v1/" in address for address in self.requests)


def held(browser: Any) -> Visit:
    """A visit that has not begun, with a clock that only the test moves."""
    visit = Visit(browser, "about:blank")
    visit.page.clock.install(time=0)
    visit.page.clock.pause_at(3_600_000)  # The clock goes on until then.
    return visit


def test_the_list_names_the_run_and_its_worst_finding(browser: Any, url: str) -> None:
    visit = Visit(browser, url)
    visit.page.get_by_text("Rank 1 is slow in backward").wait_for()
    assert visit.page.get_by_role("link", name="picture").get_attribute("href") == "/runs/picture"
    assert visit.complaints == []
    assert all(address.startswith(url) for address in visit.requests)


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
    steps, spans = (changed(columns, step=columns.step + by) for columns in (sent.steps, sent.spans) if columns)
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
    visit.page.get_by_text("not for you", exact=True).wait_for()
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
        visit.page.get_by_text("this token may ingest, and this needs read", exact=True).wait_for()
        assert "this token may ingest" in visit.asked[1]
        visit = Visit(browser, guarded.url, "wrong", kept(database, "more", "default", "ingest"), "s3cret")
        visit.page.get_by_role("link", name="kept").wait_for()
        visit.page.reload()
        visit.page.get_by_role("link", name="kept").wait_for()
        assert len(visit.asked) == 3


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
