"""Colours of the pictures: each means one thing in all of them. Those of a step's parts are in `style.css` as well.

Source of the colours of a step's parts: M. Okabe and K. Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bokeh.palettes import Magma256

from ddpobs_server.figures.selection import Selection

PART_COLORS = {
    "data": "#e69f00",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "waiting": "#f0e442",
    "exposed_comm": "#d55e00",
    "optimizer": "#009e73",
    "other": "#a8b0b9",
}
"""Colour of each of `STEP_PARTS`."""
PART_TITLES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "waiting": "waiting for ranks",
    "exposed_comm": "moving data",
    "optimizer": "optimizer",
    "other": "other",
}
HATCHES = {"waiting": {"hatch_pattern": "right_diagonal_line", "hatch_color": "#5c5300", "hatch_alpha": 0.45}}
"""Hatch of a part that its colour alone would not tell from the others."""
COMPUTE, MOVING = PART_COLORS["backward"], PART_COLORS["exposed_comm"]
WAITING_STYLE = {"fill_color": PART_COLORS["waiting"], **HATCHES["waiting"]}


@dataclass(frozen=True)
class Theme:
    """Colours of a light or a dark page.

    Attributes:
        ink: Text and lines.
        muted: Labels of axes.
        line: Grid lines.
        paper: Background.
        severity: Colour by severity.
        cost: Sequential scale, from no cost on.
        legend_columns: Columns of a legend: as many as are as wide as the page.
    """

    ink: str
    muted: str
    line: str
    paper: str
    severity: dict[str, str]
    cost: tuple[str, ...]
    legend_columns: int = 9


LIGHT = Theme(
    ink="#16202c",
    muted="#5c6b7a",
    line="#dfe4ea",
    paper="#fff",  # Bokeh leaves its own default, `#ffffff`, out of an item: a report could not darken it.
    severity={"critical": "#b91c1c", "warning": "#b45309", "info": "#1d4ed8"},
    cost=("#ffffff", *Magma256[250:30:-1]),
)
DARK = Theme(
    ink="#e6ebf0",
    muted="#93a1af",
    line="#2a343f",
    paper="#171e26",
    severity={"critical": "#f87171", "warning": "#fbbf24", "info": "#7aa2ff"},
    cost=("#171e26", *Magma256[40:250]),
)


def dark_colors() -> list[tuple[str, str]]:
    """Pairs of a colour of the light theme and the dark theme's, for a picture that changes with its page."""
    names = ("ink", "muted", "line", "paper")
    pairs = [(getattr(LIGHT, name), getattr(DARK, name)) for name in names]
    return [*pairs, *((LIGHT.severity[name], DARK.severity[name]) for name in LIGHT.severity)]


def theme_of(selection: Selection) -> Theme:
    """Return the colours of the reader's page, and the width of its legends."""
    return replace(DARK if selection.dark else LIGHT, legend_columns=selection.legend)
