"""The page of the hostile runs of `benchmarks/soak.py` in a real Chromium: costly ones, and hostile text as names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from benchmarks import soak_load
from benchmarks.rig.collector import collector
from benchmarks.tenants import Collector, Tenant, hostile_batches
from tests.support.server.browsing import Visit, drawn

RUNS = [soak_load.HOSTILE, soak_load.TEXT]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The runs, sent as the soak sends them."""
    folder = tmp_path_factory.mktemp("hostile")
    with collector(folder) as running, httpx.Client(timeout=60) as client:
        tenant = Tenant(Collector(folder, "", port=int(running.url.rpartition(":")[2])), "unused", "loud")
        costly = soak_load.Costly((tenant, tenant), 0)
        batches = [payload for seq in range(2) for payload in hostile_batches(tenant, seq + 1)]
        outcomes = [tenant.put(client, payload).status_code for payload in [*batches, costly.text(), costly.text()]]
        # The second layout of 9,999 buckets is beyond the limit of a run.
        assert outcomes == [201, 201, 201, 201, 422, 201, 201, 201]
        yield running.url


def expect_clean(visit: Visit) -> None:
    """No name has added an element to the document, and no script failed."""
    expect(visit.page.locator("script", has_text="alert(1)")).to_have_count(0)
    assert visit.errors == []


@pytest.mark.parametrize(("run", "selection"), zip(RUNS, ["?step=1", ""], strict=True))
def test_a_hostile_run_is_shown(browser: Any, url: str, run: str, selection: str) -> None:
    visit = drawn(browser, f"{url}/runs/{run}{selection}")
    expect(visit.page.locator("#processes tbody tr")).to_have_count(1)
    expect(visit.page.locator("#figure-step canvas")).not_to_have_count(0)
    expect_clean(visit)
    visit.page.goto(f"{url}/api/v1/runs/{run}/report.html")
    visit.page.get_by_role("heading", name="Ranks", exact=True).wait_for()
    expect_clean(visit)


def test_hostile_runs_are_listed_and_compared(browser: Any, url: str) -> None:
    visit = Visit(browser, url)
    for run in RUNS:
        visit.page.locator("#runs").get_by_role("link", name=run, exact=True).wait_for()
    visit.page.goto(f"{url}/compare?a={RUNS[0]}&b={RUNS[1]}")
    visit.page.wait_for_load_state("networkidle")
    expect_clean(visit)
