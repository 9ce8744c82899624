"""Files are uploaded on the page, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import expect

from benchmarks.rig.collector import collector
from tests.support.profiler_traces import trace
from tests.support.server.browsing import Visit
from tests.support.server.tokens import create_token


def open_form(visit: Visit, files: list[Path]) -> None:
    visit.page.get_by_role("button", name="Import files …").click()
    visit.page.get_by_label("Files", exact=True).set_input_files(files)


def test_files_that_are_uploaded_open_their_run(browser: Any, tmp_path: Path) -> None:
    files = [trace(tmp_path, f"slow_rank{rank}.pt.trace.json", rank=rank) for rank in range(2)]
    with collector(tmp_path) as running:
        visit = Visit(browser, running.url)
        open_form(visit, files)
        expect(visit.page.get_by_label("Name of the run")).to_have_value("slow_rank0")
        visit.page.get_by_label("Name of the run").fill("monday")
        visit.page.get_by_role("button", name="Import", exact=True).click()
        visit.page.wait_for_url("**/runs/monday")
        visit.page.get_by_text("finished").first.wait_for()
        assert visit.errors == []


def test_a_refused_file_is_named_and_the_form_stays(browser: Any, tmp_path: Path) -> None:
    bad = tmp_path / "cut.json"
    bad.write_text('{"traceEvents": [{"na')
    with collector(tmp_path) as running:
        visit = Visit(browser, running.url)
        open_form(visit, [bad])
        visit.page.get_by_role("button", name="Import", exact=True).click()
        visit.page.get_by_text("cut.json: expected a whole list of events").wait_for()
        expect(visit.page.locator("progress")).to_be_hidden()
        assert httpx.get(f"{running.url}/api/v1/runs").json()["runs"] == []


def test_a_token_with_the_scope_ingest_is_asked_for(browser: Any, tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/runs.db"
    tokens = [create_token(address, scope, "team", scope) for scope in ("read",)]
    both = create_token(address, "both", "team", "read", "ingest")
    with collector(tmp_path) as running:
        visit = Visit(browser, running.url, *tokens, both)
        open_form(visit, [trace(tmp_path)])
        visit.page.get_by_role("button", name="Import", exact=True).click()
        visit.page.wait_for_url("**/runs/t")
