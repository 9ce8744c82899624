"""A picture with its text: what a reader without eyes for it needs, and the table behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import bokeh
from bokeh.document import Document
from bokeh.models import Plot

TABLE_ROWS = 100
"""Maximum number of rows of a picture's table."""


@dataclass(frozen=True)
class Picture:
    """A picture of a run.

    Attributes:
        name: Its name in the REST API.
        title: Heading.
        summary: What is to be seen, in one or two sentences.
        plot: The drawing; None if there is nothing to draw, and `summary` has the reason.
        columns: Heads of the table behind the picture.
        rows: Its rows, at most `TABLE_ROWS`.
        shown: Steps, ranks and step that are drawn.
    """

    name: str
    title: str
    summary: str
    plot: Plot | None = None
    columns: tuple[str, ...] = ()
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the picture in the form of the REST API; `item` is for BokehJS."""
        return {
            "figure": self.name,
            "title": self.title,
            "summary": self.summary,
            "item": None if self.plot is None else _item(self.plot),
            "height": 0 if self.plot is None else self.plot.height or 0,
            "table": {"columns": list(self.columns), "rows": [list(row) for row in self.rows[:TABLE_ROWS]]},
            "shown": self.shown,
        }


def _item(plot: Plot) -> dict[str, Any]:
    """Return what `bokeh.embed.json_item` returns, without its checks, which visit each model three times more."""
    document = Document(title="")
    document.add_root(plot)
    content = document.to_json(deferred=False)
    return {"target_id": None, "root_id": plot.ref["id"], "doc": content, "version": bokeh.__version__}
