"""Where the time went: the account of the whole run as one bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, PrintfTickFormatter, Range1d
from bokeh.plotting import figure

from ddpobs.shared.quantities import duration
from ddpobs.shared.words import percent
from ddpobs_server.analysis.account.parts import WAITING
from ddpobs_server.figures.canvas import add_hover, add_legend, add_quads, base_plot
from ddpobs_server.figures.figure_data import FigureData
from ddpobs_server.figures.picture import Picture
from ddpobs_server.figures.selection import Selection
from ddpobs_server.figures.theme import HATCHES, PART_COLORS, PART_TITLES, Theme, theme_of

NAME, TITLE = "account", "Where the time went"
PLACE, SELECTION = 1, ()
_MIN_SHARE = 0.0005
"""A smaller share would be written as 0.0 %."""
GROUPS = {
    "start_up": ("#cc79a7", " "),
    "steps": ("#94a3b8", " "),
    "outside": ("#8c6d31", " "),
    "restarts": ("#b91c1c", "cross"),
    "idle": ("#7b8794", "dot"),
    "not_known": ("#c9d0d8", "right_diagonal_line"),
}
"""Colour and hatch of each group of parts, in the order of the bar."""


def make(data: FigureData, selection: Selection) -> Picture:
    """Draw the account of the whole run."""
    return account(data.account(), theme_of(selection))


def account(response: Mapping[str, Any], theme: Theme) -> Picture:
    """Draw the parts of an account, in the form of the REST API."""
    ordered = [part for group in GROUPS for part in response["parts"] if part["group"] == group]
    parts = [part for part in ordered if part["share"] >= _MIN_SHARE]
    if not parts:
        return Picture(NAME, TITLE, "No rank has accounted for its time.")
    by_size = sorted(parts, key=lambda part: -part["rank_ns"])
    rows = [(part["title"], percent(part["share"], 1), duration(part["rank_ns"])) for part in by_size]
    return Picture(NAME, TITLE, _summary(response), _draw(parts, theme), ("part", "share", "time of all ranks"), rows)


def _summary(response: Mapping[str, Any]) -> str:
    cost = "" if response["lost_cost"] is None else f"At the set price the loss is {response['lost_cost']:,.2f}."
    return f"{response['summary']} {cost}".strip()


def _draw(parts: Sequence[Mapping[str, Any]], theme: Theme) -> figure:
    plot = base_plot(NAME, theme, 130, x_range=Range1d(start=0, end=100), y_range=Range1d(start=0, end=1))
    plot.toolbar_location, plot.yaxis.visible = None, False
    plot.grid.grid_line_color = None
    plot.xaxis.axis_label = "% of the ranks' wall time"
    plot.xaxis.formatter = PrintfTickFormatter(format="%.6g %%")
    left, glyphs = 0.0, []
    for label in dict.fromkeys(_label(part) for part in parts):
        own = [part for part in parts if _label(part) == label]
        shares = np.array([100 * part["share"] for part in own])
        ends = left + np.cumsum(shares)
        left = float(ends[-1])
        data = {
            "left": ends - shares,
            "right": ends,
            "title": [part["title"] for part in own],
            "share": shares,
            "time": [duration(part["rank_ns"]) for part in own],
        }
        style = _style(own[0], theme) | {"legend_label": label, "line_color": theme.paper}
        glyphs.append(add_quads(plot, ColumnDataSource(data), ("left", "right", 1.0, 0.1), **style))
    add_hover(plot, glyphs, ("part", "@title"), ("share", "@share{0.0} %"), ("time of all ranks", "@time"))
    add_legend(plot, theme)
    plot.legend.click_policy = "none"
    return plot


def _step_part(part: Mapping[str, Any]) -> str:
    """Return the name of a part of a step; empty for a part outside of steps."""
    name = "waiting" if part["part"] == WAITING else str(part["part"])
    return name if part["group"] == "steps" and name in PART_TITLES else ""


def _label(part: Mapping[str, Any]) -> str:
    return PART_TITLES[name] if (name := _step_part(part)) else str(part["group_title"])


def _style(part: Mapping[str, Any], theme: Theme) -> dict[str, Any]:
    """Return the style of a part: parts of steps have their own colours, the other parts their group's."""
    if name := _step_part(part):
        return {"fill_color": PART_COLORS[name], **HATCHES.get(name, {})}
    color, hatch = GROUPS[part["group"]]
    style = {"hatch_pattern": hatch, "hatch_color": theme.ink, "hatch_alpha": 0.35}
    return {"fill_color": color, **style}
