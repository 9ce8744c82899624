"""The help on a finding: its page in `docs/findings/`, which the wheel has as `page/help_pages/`."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from pathlib import Path

_PAGE = Path(__file__).parent
_PACKAGED, _SOURCE = _PAGE / "help_pages", _PAGE.parents[2] / "docs" / "findings"
FOLDER = _PACKAGED if _PACKAGED.exists() else _SOURCE
_OTHER_HELP = re.compile(r"\]\(([\w-]+)\.md(?:#[^)]*)?\)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
"""A link to a page that is not on the collector: its text stays."""


@cache
def help_page(code: str) -> str | None:
    """Return the help on a kind of finding as HTML; None if there is none."""
    from markdown_it import MarkdownIt

    if code not in {path.stem for path in FOLDER.glob("*.md")}:
        return None
    text = (FOLDER / f"{code}.md").read_text(encoding="utf-8")
    content = MarkdownIt("commonmark", {"html": False}).enable("table").render(_with_links(text))
    return (_PAGE / "static" / "help.html").read_text().replace("{code}", escape(code)).replace("{content}", content)


def _with_links(text: str) -> str:
    return _OTHER_HELP.sub(r"](\1)", _OUTSIDE.sub(r"\1", text))
