"""A figure of a run, as the collector's page draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

LEGEND_COLUMNS = 4
"""Columns of a legend that are as wide as a notebook's cell."""
_TEXT_PX = 160
"""Height of title, summary and the table's head, which surround the drawing."""


class Figure:
    """A figure, drawn by the collector: a notebook shows it in a frame, without Bokeh.

    Args:
        document: The figure in the form of the REST API.
        read_html: Reads the figure as an HTML file.

    Attributes:
        name: Its name.
        title: Heading.
        summary: What the figure shows in words, or the reason for its absence.
        columns: Titles of the table behind the figure.
        rows: Rows of that table as text, at most 100.
        shown: Steps, ranks and step that are drawn.
    """

    def __init__(self, document: Mapping[str, Any], read_html: Callable[[], bytes]) -> None:
        self.name: str = document["figure"]
        self.title: str = document["title"]
        self.summary: str = document["summary"]
        self.columns: list[str] = document["table"]["columns"]
        self.rows: list[list[str | int]] = document["table"]["rows"]
        self.shown: dict[str, Any] = document["shown"]
        self._height: int = document["height"]
        self._read_html = read_html

    @cached_property
    def html(self) -> str:
        """The figure as an HTML page that needs no other file; about 1.5 MB.

        Raises:
            CollectorError: The collector does not answer, or refuses.
        """
        return self._read_html().decode()

    def save(self, path: str | Path) -> None:
        """Write the HTML page to a file."""
        Path(path).write_text(self.html, encoding="utf-8")

    def __repr__(self) -> str:
        return f"{self.title}: {self.summary}"

    def _repr_html_(self) -> str:
        if not self._height:
            return f"<p><b>{escape(self.title)}</b>: {escape(self.summary)}</p>"
        # The frame keeps scripts and styles of the figure and of the notebook apart.
        style = f"width: 100%; height: {self._height + _TEXT_PX}px; border: 0"
        attributes = {"title": self.title, "sandbox": "allow-scripts", "style": style, "srcdoc": self.html}
        return "<iframe" + "".join(f' {name}="{escape(value)}"' for name, value in attributes.items()) + "></iframe>"
