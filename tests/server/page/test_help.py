"""The help on findings that the collector serves."""

from __future__ import annotations

import httpx
import pytest
from ddpobs_server.analysis.findings.registry import MODULES

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


def test_there_is_no_help_on_an_unknown_finding(url: str) -> None:
    for code in ("none", "..%2Findex"):
        assert httpx.get(f"{url}/help/{code}").status_code == 404
