"""The list of all figures, and the guide for adding another.

Write `kinds/NAME.py`; no other file changes. NAME is the figure's name in the REST API. The file declares

- `TITLE`, its heading;
- `PLACE`, which orders the figures on the page and in the report;
- `SELECTION`, those of the parameters `from`, `to`, `rank`, `step`, `bucket`, `match` and `order` that it depends on;
- `make(data: FigureData, selection: Selection) -> Picture`.

Its tests go to `tests/server/page/`. `/api/v1/figures` lists the figures; the page, the report and the notebook follow
that list. A figure that answers a click names its handler in `page/static/figure_events.js`.

The kinds import Bokeh, which takes half a second: they are imported for the first request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from ddpobs_server.figures import kinds
from ddpobs_server.figures.selection import Selection

if TYPE_CHECKING:
    from ddpobs_server.figures.figure_data import FigureData
    from ddpobs_server.figures.picture import Picture

NAMES = tuple(module.name for module in iter_modules(kinds.__path__))


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure; the module's docstring describes the attributes."""

    name: str
    title: str
    place: int
    selection: tuple[str, ...]
    make: Callable[[FigureData, Selection], Picture]


@cache
def figure_kinds() -> dict[str, FigureKind]:
    """Import all kinds; return them by name, in the order of the page."""
    found = [_kind(name) for name in NAMES]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: kind.place)}


def _kind(name: str) -> FigureKind:
    module = import_module(f"{kinds.__name__}.{name}")
    return FigureKind(name, module.TITLE, module.PLACE, module.SELECTION, module.make)
