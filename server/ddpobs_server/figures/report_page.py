"""HTML files that need no other file: the report of a run, or one of its pictures, with the program that draws."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from bokeh.resources import Resources

from ddpobs.shared.quantities import time_range
from ddpobs.shared.words import finding_lines, shown_findings
from ddpobs_server.figures.canvas import LEGEND_ROW
from ddpobs_server.figures.report_policy import report_policy
from ddpobs_server.figures.report_tables import ReportTable
from ddpobs_server.figures.theme import DARK, dark_colors

_MAX_INTERVALS = 3
_STACKS = ("stacks", "threads", "traceback", "output")
"""Facts that are shown as they are, below the finding."""
_CODE = re.compile(r"`([^`]+)`")
_STATIC = Path(__file__).parent / "static"
_START = """
const isDark = matchMedia("(prefers-color-scheme: dark)");
const { colors, scale, row } = JSON.parse(document.getElementById("theme").textContent);
const darkened = new Map(colors);
// A legend has as many columns as are as wide as the figure; each row makes the figure higher.
const item = (text, columns) => {
  const isDarkened = isDark.matches && document.body.matches(".auto");
  let rows = 0;
  return JSON.parse(text, (key, value) => {
    if (value?.name === "Legend") {
      const { items, ncols } = value.attributes;
      value.attributes.ncols = Math.min(ncols, columns);
      rows = Math.ceil(items.length / value.attributes.ncols) - Math.ceil(items.length / ncols);
    }
    if (value?.name === "Figure") value.attributes.height += rows * row;
    if (!isDarkened) return value;
    return key === "palette" ? scale : darkened.get(value) ?? value;
  });
};
const places = document.querySelectorAll("[data-item]");
const fitting = () => Math.max(1, Math.floor(places[0]?.clientWidth / 165));
let columns = 0;
function draw() {
  columns = fitting();
  for (const drawn of Bokeh.documents.splice(0)) drawn.clear();
  for (const place of places) {
    place.replaceChildren();
    Bokeh.embed.embed_item(item(document.getElementById(place.dataset.item).textContent, columns), place);
  }
}
isDark.addEventListener("change", draw);
addEventListener("resize", () => fitting() !== columns && draw());
draw();
"""


def report_page(
    run: str,
    address: str,
    facts: Mapping[str, str],
    diagnosis: Mapping[str, Any],
    pictures: Sequence[Mapping[str, Any]],
    *,
    tables: Sequence[ReportTable],
) -> tuple[str, str]:
    """Return the file, and the nonce that its security policy allows.

    Args:
        run: Name of the run.
        address: Address of its page.
        facts: Facts below its name, in order.
        diagnosis: Findings, in the form of the REST API.
        pictures: In the form of the REST API.
        tables: Tables below the pictures.
    """
    nonce = secrets.token_urlsafe(16)
    missing = "".join(f"<li>{escape(reason)}</li>" for reason in diagnosis["missing"])
    collector, has_steps = address.rpartition("/runs/")[0], diagnosis["steps_seen"] > 0
    parts = [
        f"<h1>{escape(run)}</h1>",
        f'<p><a href="{escape(address)}">{escape(address)}</a></p>',
        _list(facts),
        *(_finding(finding, collector, has_steps=has_steps) for finding in shown_findings(diagnosis)),
        f"<p>{escape(diagnosis['summary'])}</p>" if diagnosis["summary"] else "",
        f"<details><summary>Not judged</summary><ul>{missing}</ul></details>" if missing else "",
        *_pictures(pictures, nonce, has_steps=has_steps),
        *(f"<h2>{escape(table.title)}</h2>{_table(table.columns, table.rows)}" for table in tables),
    ]
    return _page(run, parts, nonce, "auto"), nonce


def figure_page(run: str, picture: Mapping[str, Any], dark: bool) -> tuple[str, str]:
    """Return a file with one picture, and the nonce that its security policy allows.

    Args:
        run: Name of the run.
        picture: In the form of the REST API.
        dark: Whether the picture has the colours of a dark page.
    """
    nonce = secrets.token_urlsafe(16)
    parts = [f'<div class="figure">{_picture(picture, nonce)}</div>']
    return _page(run, parts, nonce, "dark" if dark else "light"), nonce


def _page(run: str, parts: Sequence[str], nonce: str, scheme: str) -> str:
    """The page in a colour scheme: `light`, `dark`, or `auto` for the reader's."""
    theme = json.dumps({"colors": dark_colors(), "scale": DARK.cost, "row": LEGEND_ROW})
    scripts = [(_STATIC / "style_nonce.js").read_text(), *Resources(mode="inline", components=["bokeh"]).js_raw, _START]
    colors = f'<script nonce="{nonce}" type="application/json" id="theme">{theme}</script>'
    body = "\n".join([*parts, colors, *(f'<script nonce="{nonce}">{script}</script>' for script in scripts)])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{report_policy(nonce)}">
<title>{escape(run)} · ddpobs</title>
<style nonce="{nonce}">{(_STATIC / "report.css").read_text()}</style>
</head>
<body class="{scheme}"><main>
{body}
</main></body>
</html>
"""


def _finding(finding: Mapping[str, Any], collector: str, *, has_steps: bool) -> str:
    """A finding with its parts and a link to its help, which the collector at this address has."""
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in finding["evidence_sentences"])
    steps = {"steps": _times(finding["intervals"])} if has_steps else {}
    if finding["parameters"]:
        steps["parameters"] = ", ".join(finding["parameters"])
    shown = {name: value for name, value in finding["evidence"].items() if name not in _STACKS}
    raw = escape(json.dumps(shown, indent=2))
    return (
        f'<article class="{escape(finding["severity"])}"><p class="code">{escape(finding["severity"])} · '
        f'<a href="{escape(collector)}/help/{escape(finding["code"])}">{escape(finding["code"])}</a></p><h2>'
        f"{escape(finding['verdict'])}</h2>{_list(dict(finding_lines(finding)))}"
        f"{''.join(f'<pre>{escape(text)}</pre>' for text in _stacks(finding['evidence']))}"
        f"<details><summary>Evidence</summary>{_list(steps)}<ul>{sentences}</ul>"
        f"<details><summary>as JSON</summary><pre>{raw}</pre></details></details></article>"
    )


def _stacks(evidence: Mapping[str, Any]) -> list[str]:
    """Return the stacks of a hang by rank and thread, and the traceback and the last output of a crash."""
    threads = evidence.get("threads", {})
    stacks = [
        "\n  ".join([title, *frames])
        for rank, stack in evidence.get("stacks", {}).items()
        for title, frames in [
            (f"Rank {rank}:", stack),
            *((f"Rank {rank}, thread {thread}:", frames) for thread, frames in threads.get(rank, {}).items()),
        ]
        if frames
    ]
    return [*stacks, *filter(None, [evidence.get("traceback"), evidence.get("output")])]


def _times(intervals: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{_steps(interval)}{_between(interval)}" for interval in intervals[:_MAX_INTERVALS]]
    more = [f"and {len(intervals) - _MAX_INTERVALS} more"] if len(intervals) > _MAX_INTERVALS else []
    return "\n".join([*lines, *more])


def _steps(interval: Mapping[str, Any]) -> str:
    first, last = interval["from"], interval["to"]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _between(interval: Mapping[str, Any]) -> str:
    began_ns, ended_ns = interval["began_ns"], interval["ended_ns"]
    return "" if began_ns is None or ended_ns is None else f", {time_range(began_ns, ended_ns)}"


def _pictures(pictures: Sequence[Mapping[str, Any]], nonce: str, *, has_steps: bool) -> list[str]:
    """The pictures; without a step, only those that show something, and why the others are not there."""
    drawn = [picture for picture in pictures if has_steps or picture["item"] is not None]
    parts = [_picture(picture, nonce) for picture in drawn]
    if len(drawn) < len(pictures):
        parts.append("<p>No step was recorded, so the figures of steps are left out.</p>")
    return parts


def _picture(picture: Mapping[str, Any], nonce: str) -> str:
    name, table = picture["figure"], picture["table"]
    text = f"<h2>{escape(picture['title'])}</h2><p>{escape(picture['summary'])}</p>"
    if picture["item"] is None:
        return text
    # A "<" could end the script element.
    item = msgspec.json.encode(picture["item"]).decode().replace("<", "\\u003c")
    return (
        f'{text}<div data-item="item-{name}"></div>'
        f'<script nonce="{nonce}" type="application/json" id="item-{name}">{item}</script>'
        f"<details><summary>As a table</summary>{_table(table['columns'], table['rows'])}</details>"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{heads}</tr>{lines}</table>"


def _list(facts: Mapping[str, str]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{_text(value)}</dd>' for name, value in facts.items())}</dl>"


def _text(value: str) -> str:
    """The value with what stands between backticks as code."""
    return _CODE.sub(r"<code>\1</code>", escape(value))
