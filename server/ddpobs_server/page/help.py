"""The help on a finding or a collector's alert: its page in `docs/`, which the wheel has in `page/help_pages/`."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from pathlib import Path

_PAGE = Path(__file__).parent
_PACKAGED, _SOURCE = _PAGE / "help_pages", _PAGE.parents[2] / "docs"
_PATTERNS = ("findings/*.md", "operations/monitoring.md", "operations/retention.md")
_OTHER_HELP = re.compile(r"\]\(([\w-]+)\.md(?:#[^)]*)?\)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
"""A link to a page that is not on the collector: its text stays."""


@cache
def help_page(code: str) -> str | None:
    """Return the help on a kind of finding as HTML; None if there is none."""
    from markdown_it import MarkdownIt

    if code not in (files := _files()):
        return None
    text = files[code].read_text(encoding="utf-8")
    content = MarkdownIt("commonmark", {"html": False}).enable("table").render(_with_links(text))
    return (_PAGE / "static" / "help.html").read_text().replace("{code}", escape(code)).replace("{content}", content)


def _files() -> dict[str, Path]:
    """Each page by its name."""
    packaged = [*_PACKAGED.glob("*.md")]
    found = packaged or [path for pattern in _PATTERNS for path in _SOURCE.glob(pattern)]
    return {path.stem: path for path in found}


def _with_links(text: str) -> str:
    return _OTHER_HELP.sub(r"](\1)", _OUTSIDE.sub(r"\1", text))
