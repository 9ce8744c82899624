"""Figures of the client in a notebook's cell, in a real Chromium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from ddpobs_server.figures.registry import NAMES

from benchmarks.rig import patience
from ddpobs import Client
from ddpobs.errors import CollectorError
from tests.support.server.browsing import Visit


def test_a_figure_is_drawn_in_a_notebook_without_the_collector(
    browser: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPOBS_TIMEOUT_S", str(patience.HANG_S))
    figure = Client(url).run("picture").figure("step", step=7, dark=True)
    assert repr(figure).startswith("One step: Step 7: 2 of 2 ranks")
    assert (figure.shown["late_rank"], figure.columns[0], figure.rows[0][0]) == (1, "rank", 0)
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><meta charset=utf-8><body>{figure._repr_html_()}</body>")
    visit = Visit(browser, cell.as_uri())
    visit.page.set_viewport_size({"width": 900, "height": 900})
    frame = visit.page.frame_locator("iframe[title='One step']")
    frame.locator(".bk-Figure canvas").first.wait_for()
    inner = visit.page.frames[1]
    drawn = inner.evaluate("Array.from(Bokeh.documents[0].get_model_by_name('moving').data.waiting_ms)")
    assert [round(ms) for ms in drawn] == [30, 0, 0, 0]
    size = inner.evaluate("[document.documentElement.scrollHeight, innerHeight, document.documentElement.scrollWidth]")
    assert size[0] <= size[1]
    assert size[2] <= 900
    assert inner.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 30, 38)"
    assert visit.requests == [cell.as_uri()]
    assert visit.errors == []


def test_each_figure_is_one_page_and_can_be_saved(url: str, tmp_path: Path) -> None:
    run = Client(url).run("picture")
    assert run.figures == ["account", "phases", "ranks", "step", "buckets"]
    assert set(run.figures) == set(NAMES)
    for name in run.figures:
        figure = run.figure(name, rank=1, first=10, last=19, match="0-1", order="rank", dark=True)
        assert figure.name == name
        assert figure.title
        assert figure.summary
    figure = run.figure("phases", rank=1, first=10, last=19)
    figure.save(tmp_path / "phases.html")
    assert re.search(r"Steps 10 to 19 of rank 1", (tmp_path / "phases.html").read_text())
    assert (
        "unsafe" not in httpx.get(f"{url}/api/v1/runs/picture/figures/phases.html").headers["Content-Security-Policy"]
    )
    empty = run.figure("account")
    assert empty._repr_html_() == "<p><b>Where the time went</b>: No rank has accounted for its time.</p>"
    with pytest.raises(CollectorError, match="422"):
        run.figure("pie")


def test_labels_are_set_from_code(url: str) -> None:
    run = Client(url).run("picture")
    run.set_labels(["nightly", "gpt"], "first try")
    run.set_labels(note="second try")
    summary = run.summary()
    assert (summary["tags"], summary["note"]) == (["nightly", "gpt"], "second try")
    run.set_labels([], "")
    with pytest.raises(CollectorError, match="tags"):
        run.set_labels(["a,b"])
