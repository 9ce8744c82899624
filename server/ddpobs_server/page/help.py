"""The help: the pages in `docs/` on findings, on alerts, on the collector, and on the terms.

The wheel has them in `page/help_pages/`.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape, unescape
from pathlib import Path

_PAGE = Path(__file__).parent
_PACKAGED, _SOURCE = _PAGE / "help_pages", _PAGE.parents[2] / "docs"
_PATTERNS = (
    "findings/*.md",
    "operations/monitoring.md",
    "operations/retention.md",
    "reference/alerts.md",
    "concepts.md",
)
_LINK = re.compile(r"\[([^\]]+)\]\((?:[\w.-]+/)*([\w-]+)\.md(#[^)]*)?\)")
_HEADING = re.compile(r"<h([2-6])>(.+?)</h\1>", re.DOTALL)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
"""A link to a file that is no page: its text stays."""


@cache
def help_page(code: str) -> str | None:
    """Return a page of the help as HTML; None if there is none."""
    from markdown_it import MarkdownIt

    if code not in (files := _files()):
        return None
    text = _OUTSIDE.sub(r"\1", _LINK.sub(_link, files[code].read_text(encoding="utf-8")))
    content = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    content = content.replace("<pre><code", '<pre tabindex="0"><code')  # A drawing is wider than a phone.
    content = _HEADING.sub(_with_anchor, content)
    return (_PAGE / "static" / "help.html").read_text().replace("{code}", escape(code)).replace("{content}", content)


@cache
def _files() -> dict[str, Path]:
    """Each page by its name."""
    packaged = [*_PACKAGED.glob("*.md")]
    found = packaged or [path for pattern in _PATTERNS for path in _SOURCE.glob(pattern)]
    return {path.stem: path for path in found}


def _link(match: re.Match[str]) -> str:
    """A link to another page of the help; of a page that the collector does not have, the text stays."""
    text, name, anchor = match[1], match[2], match[3] or ""
    return f"[{text}]({name}{anchor})" if name in _files() else text


def _with_anchor(match: re.Match[str]) -> str:
    """The heading with the anchor that it has on the documentation site."""
    plain = unescape(re.sub(r"<[^>]+>", "", match[2]))
    anchor = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
    return f'<h{match[1]} id="{escape(anchor)}">{match[2]}</h{match[1]}>'
