"""Draw predictions against measurements, from results of `python -m benchmarks.whatif --json FILE`.

python -m scripts.whatif_picture [benchmarks/results/whatif-….json] [--picture docs/pictures/whatif.png]

It takes the newest results by default, and needs Debian's Chromium.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.embed import file_html
from bokeh.layouts import row
from bokeh.models import ColumnDataSource, Range1d
from bokeh.models.annotations.geometry import BoxAnnotation, Slope, Whisker
from bokeh.plotting import figure
from bokeh.resources import INLINE
from playwright.sync_api import sync_playwright

from scripts.screenshot import QUIET, chromium

ROOT = Path(__file__).parents[1]
KINDS = {
    "cap": ("another bucket cap", "#0072b2", "circle"),
    "strategy": ("fp16", "#d55e00", "square"),
    "batches": ("three batches a step", "#009e73", "triangle"),
    "link": ("another link", "#cc79a7", "diamond"),
}
"""Title, colour and marker of each kind of change."""
_WIDTH, _HEIGHT = 560, 460
_NS_PER_MS = 1e6
_GOAL = 3.0
"""Median error in per cent that the model is to keep below."""


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    newest = max(ROOT.glob("benchmarks/results/whatif-20*.json"), default=None)
    parser.add_argument("results", type=Path, nargs="?", default=newest)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "whatif.png")
    options = parser.parse_args()
    if options.results is None:
        sys.exit(
            "no benchmarks/results/whatif-*.json: run `python -m benchmarks.whatif --json FILE`, and give the file"
        )
    known = [
        row for row in json.loads(options.results.read_text())["rows"] if not row["refused"] and row["measured_ns"]
    ]
    if not known:
        sys.exit(f"{options.results} has no prediction that was measured")
    html = file_html(row(_steps(known), _errors(known)), INLINE, "predicted against measured")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(QUIET))
        page = browser.new_page(viewport={"width": 2 * _WIDTH + 16, "height": _HEIGHT + 16}, device_scale_factor=1.5)
        page.set_content(html)
        page.wait_for_function("Bokeh.documents.length == 1 && Bokeh.documents[0].is_idle")
        page.screenshot(path=options.picture)
        browser.close()


def _sources(rows: Sequence[dict[str, Any]]) -> dict[str, ColumnDataSource]:
    """Return measured step, predicted step and interval by kind, in ms; the errors in per cent of the measured step."""
    found = {}
    for kind in KINDS:
        own = [each for each in rows if each["kind"] == kind]
        columns = {
            name: [each[f"{name}_ns"] / _NS_PER_MS for each in own] for name in ("measured", "step", "low", "high")
        }
        for name in ("step", "low", "high"):
            columns[f"{name}_error"] = [
                100 * (predicted / measured - 1)
                for predicted, measured in zip(columns[name], columns["measured"], strict=True)
            ]
        if own:
            found[kind] = ColumnDataSource(columns)
    return found


def _plot(rows: Sequence[dict[str, Any]], title: str, suffix: str, **axes: Any) -> figure:
    """Draw each prediction with its interval over its measured step."""
    plot = figure(width=_WIDTH, height=_HEIGHT, title=title, x_axis_type="log", toolbar_location=None, **axes)
    plot.xaxis.axis_label = "measured step, ms"
    for kind, source in _sources(rows).items():
        legend, color, marker = KINDS[kind]
        names = (f"low{suffix}", f"high{suffix}")
        plot.add_layout(
            Whisker(
                base="measured",
                lower=names[0],
                upper=names[1],
                source=source,
                line_color=color,
                lower_head=None,
                upper_head=None,
            )
        )
        style: Any = {"marker": marker, "size": 8, "color": color, "fill_alpha": 0.6, "legend_label": legend}
        plot.scatter("measured", f"step{suffix}", source=source, **style)
    plot.legend.location = "top_left"
    return plot


def _steps(rows: Sequence[dict[str, Any]]) -> figure:
    plot = _plot(rows, "Predicted against measured step", "", y_axis_type="log")
    plot.yaxis.axis_label = "predicted step, ms"
    ends = [pick(each["measured_ns"] for each in rows) / _NS_PER_MS for pick in (min, max)]
    plot.line(ends, ends, line_color="#7b8794", line_dash="dashed")
    return plot


def _errors(rows: Sequence[dict[str, Any]]) -> figure:
    plot = _plot(rows, f"Error of the prediction, with its interval; shaded: ± {_GOAL:g} %", "_error")
    plot.yaxis.axis_label = "predicted above measured, %"
    sources = _sources(rows).values()
    lows, highs = (np.concatenate([source.data[f"{end}_error"] for source in sources]) for end in ("low", "high"))
    plot.y_range = Range1d(start=1.1 * lows.min(), end=1.1 * highs.max())
    plot.add_layout(Slope(gradient=0, y_intercept=0, line_color="#7b8794", line_dash="dashed"))
    plot.add_layout(BoxAnnotation(bottom=-_GOAL, top=_GOAL, fill_color="#94a3b8", fill_alpha=0.15))
    plot.legend.visible = False
    return plot


if __name__ == "__main__":
    main()
