"""Pictures in the form that BokehJS draws."""

from __future__ import annotations

from typing import Any

from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, Range1d
from ddpobs_server.figures.canvas import add_legend, add_quads, base_plot
from ddpobs_server.figures.picture import Picture
from ddpobs_server.figures.selection import Selection
from ddpobs_server.figures.theme import theme_of


def test_the_item_of_a_picture_is_bokeh_s_own() -> None:
    theme = theme_of(Selection())
    plot = base_plot("a", theme, 100, x_range=Range1d(start=0, end=1), y_range=Range1d(start=0, end=1))
    source = ColumnDataSource({"left": [0.1, 0.5], "right": [0.4, 0.9]})
    add_quads(plot, source, ("left", "right", 1.0, 0.1), fill_color="red", legend_label="a part")
    add_legend(plot, theme)
    item = Picture("a", "A", "A part.", plot).as_json()["item"]
    expected: Any = json_item(plot)
    for each in (item, expected):
        each["doc"]["config"].pop("id")  # It differs with each document.
    assert item == expected
