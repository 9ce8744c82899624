"""The help on findings that the collector serves."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from ddpobs_server.analysis.findings.registry import MODULES
from playwright.sync_api import expect

from dashboards.alert_page import ALERTS
from tests.support.server.browsing import Visit

CODES = [*(code for module in MODULES for code in module.CODES), "concepts"]


@pytest.mark.parametrize("code", CODES)
def test_each_finding_has_help_without_links_that_lead_nowhere(url: str, code: str) -> None:
    page = httpx.get(f"{url}/help/{code}")
    assert (page.status_code, page.text.count("<h1>")) == (200, 1)
    assert ".md" not in "".join(part.partition('"')[0] for part in page.text.split('href="')[1:])


def test_a_finding_links_to_its_help(browser: object, url: str) -> None:
    visit = Visit(browser, f"{url}/runs/picture")
    with visit.page.expect_popup() as opened:
        visit.page.get_by_role("link", name="help on straggler").click()
    opened.value.get_by_role("heading", name="Slow ranks (stragglers)", exact=True).wait_for()
    assert visit.errors == []


@pytest.mark.parametrize("code", ["crash", "monitoring", "concepts", "alerts"])
def test_help_is_readable_on_a_phone(browser: Any, url: str, code: str) -> None:
    visit = Visit(browser, f"{url}/help/{code}")
    visit.page.set_viewport_size({"width": 390, "height": 844})
    wide = "[...document.querySelectorAll('body, table')].filter((node) => node.scrollWidth > node.clientWidth).length"
    assert visit.page.evaluate(wide) == 0
    results = Axe().run(visit.page)
    assert results.violations_count == 0, results.generate_report()


def test_each_alert_links_to_the_help_on_its_finding_or_on_itself(browser: Any, url: str) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    visit = Visit(browser, f"{url}/help/alerts")
    for rule in rules:
        path, _, own = rule["annotations"]["runbook_url"].rpartition("{{ end }}")[2].partition("#")
        assert httpx.get(f"{url}{path}").status_code == 200
        if own:
            anchor = own
            assert path == "/help/alerts"
            expect(visit.page.locator(f"h3#{anchor}")).to_have_text(rule["alert"])
    visit.page.goto(f"{url}/help/alerts#{anchor}")
    expect(visit.page.locator(f"h3#{anchor}")).to_be_in_viewport()
    visit.page.get_by_role("link", name="how they are sent").click()
    expect(visit.page.locator("h2#alerts")).to_be_in_viewport()
    visit.page.go_back()
    for guide in visit.page.get_by_role("link", name=re.compile("^(straggler|retention)$")).all():
        address = guide.get_attribute("href")
        assert httpx.get(f"{url}/help/{address}").status_code == 200
    assert visit.errors == []


def test_there_is_no_help_on_an_unknown_finding(url: str) -> None:
    for code in ("none", "..%2Findex"):
        assert httpx.get(f"{url}/help/{code}").status_code == 404
