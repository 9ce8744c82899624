"""The legends of the report in windows of all widths."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.server.browsing import Visit

LEGENDS = 3
"""Figures of the run `picture` that have a legend."""
_DRAWN = """(width) => Bokeh.documents.map((drawn) => drawn.roots()[0].inner_width)
    .every((inner) => inner > 0 && inner < width)"""
_SCROLLED = "(places) => places.filter((place) => place.scrollWidth > place.clientWidth).length"


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_the_legends_are_in_sight_also_after_the_window_has_changed(browser: Any, url: str, width: int) -> None:
    visit = Visit(browser, f"{url}/api/v1/runs/picture/report.html")
    legends = visit.page.locator("[data-item] .bk-Legend")
    expect(legends).to_have_count(LEGENDS)
    visit.page.set_viewport_size({"width": width, "height": 844})
    visit.page.wait_for_function(_DRAWN, arg=width)
    expect(legends).to_have_count(LEGENDS)
    for box in (legend.bounding_box() for legend in legends.all()):
        assert box is not None
        assert 0 <= box["x"] < box["x"] + box["width"] <= width
    assert visit.page.locator("[data-item]").evaluate_all(_SCROLLED) == 0
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    assert visit.errors == []
