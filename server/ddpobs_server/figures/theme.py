"""Colours of the pictures: each means one thing in all of them. The phases' colours are in `run.css` as well.

Source of the phases' colours: M. Okabe and K. Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bokeh.palettes import Magma256

from ddpobs_server.figures.selection import Selection

PHASE_COLORS = {
    "data": "#e69f00",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "exposed_comm": "#d55e00",
    "optimizer": "#009e73",
    "other": "#a8b0b9",
}
PHASE_TITLES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "exposed_comm": "exposed communication",
    "optimizer": "optimizer",
    "other": "other",
}
COMPUTE, MOVING = PHASE_COLORS["backward"], PHASE_COLORS["exposed_comm"]
WAITING_STYLE = {
    "fill_color": "#f3bf9b",
    "hatch_pattern": "right_diagonal_line",
    "hatch_color": MOVING,
    "hatch_alpha": 0.6,
}
SPREAD = PHASE_COLORS["forward"]


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
    paper="#ffffff",
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


def theme_of(selection: Selection) -> Theme:
    """Return the colours of the reader's page, and the width of its legends."""
    return replace(DARK if selection.dark else LIGHT, legend_columns=selection.legend)
