"""The sliders of the run's page in a real Chromium."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.server.batches import get
from tests.support.server.browsing import Visit, drawn
from tests.support.server.whatif_run import RUN, send


@pytest.fixture(scope="module")
def address(url: str) -> str:
    """The page of a run whose link is the bottleneck."""
    send(url, "sliders", RUN)
    return f"{url}/runs/sliders"


def answer(visit: Visit, pattern: str) -> str:
    found = visit.page.locator("#whatif-answer").filter(has_text=re.compile(pattern))
    found.wait_for()
    return str(found.inner_text())


def test_a_slider_predicts_the_step_and_draws_it_below_the_present_one(browser: Any, url: str, address: str) -> None:
    visit = drawn(browser, address)
    assert answer(visit, "A step takes").startswith("A step takes 55.2 ms.")
    visit.page.locator("#whatif-link").fill("1")
    text = answer(visit, "a link 2 times as fast")
    predicted = get(url, "/runs/sliders/whatif", link_factor=2)["answers"][0]["prediction"]
    assert f"{predicted['step_ns'] / 1e6:.3g} ms a step" in text
    assert predicted["words"] in text
    titles = visit.page.locator("#whatif-picture figcaption")
    expect(titles).to_have_text([re.compile("^now:"), re.compile("^after:")])
    expect(visit.page.locator("#whatif-picture .whatif-exposed_comm")).to_have_count(4)
    expect(visit.page).to_have_url(re.compile("whatif=link_factor%3D2"))
    assert visit.errors == []


def test_the_address_holds_the_change(browser: Any, url: str, address: str) -> None:
    visit = drawn(browser, f"{address}?whatif=compression%3Dfp16%26accumulate%3D4")
    text = answer(visit, "4 batches a step")
    assert "comm='fp16', 4 batches a step" in text
    assert re.search(r"ms a batch \(.* of 55.2 ms a batch \(", text)
    predicted = get(url, "/runs/sliders/whatif", compression="fp16", accumulate=4)["answers"][0]["prediction"]
    of_a_step = f"{4 * predicted['step_ns'] / 1e6:.3g} ms for 4 batches"
    expect(visit.page.locator("#whatif-picture figcaption").last).to_contain_text(of_a_step)
    expect(visit.page.locator("#whatif-batches-value")).to_have_text("4 a step")
    visit.page.get_by_role("button", name="As now").click()
    answer(visit, "A step takes")
    expect(visit.page).to_have_url(address)


def test_what_the_run_does_not_show_is_refused_on_the_page(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture?whatif=link_factor%3D2")
    assert "not known, because" in answer(visit, "ot known, because").lower()
