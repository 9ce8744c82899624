"""The box at the end of a training: the parts of the worst finding, phases as a bar, and the run's address."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ddpobs.shared.words import (
    LABEL_COLUMNS,
    finding_heading,
    finding_lines,
    labelled,
    own_cost_text,
    percent,
    shown_findings,
)
from ddpobs.wire import printable

MAX_PART_ROWS = 4
"""Rows of one part of a finding: a message of a crash may be as long as a page."""
_MIN_COLUMNS, _MAX_COLUMNS = 60, 110
_BAR_CELLS = 40
_MAX_NAMED_PARTS = 4
"""Parts in the legend, besides the rest; fewer where they do not fit."""
_MAX_LEGEND_ROWS = 2
_MIN_SHARE = 0.005
"""A smaller share would be written as 0 %."""
_SIGNS = "█▓▒░▞"
"""Fill of each part of the bar, in the order of the legend."""
_ASCII = str.maketrans("┌┐└┘─│█▓▒░▞±→…–µ", "++++-|#=+.:~>.-u")
_COLOURS = {"critical": "1;31", "warning": "1;33", "info": "1;36"}


def box(
    diagnosis: Mapping[str, Any],
    account: Mapping[str, Any],
    address: str,
    columns: int,
    *,
    colour: bool,
    state: str = "finished",
) -> list[str]:
    """Lines of the box.

    Args:
        diagnosis: The collector's diagnostics of the run.
        account: The collector's account of the run's wall time.
        address: Address of the run's page.
        columns: Width of the terminal, in characters.
        colour: Whether the terminal shows colours.
        state: The run's state; the frame shows an interrupt, which has no finding.
    """
    inner = min(_MAX_COLUMNS, max(_MIN_COLUMNS, columns)) - 4
    findings = shown_findings(diagnosis)
    heading, parts, severity = _finding(findings) if findings else (diagnosis["summary"], [], "")
    rows = [row for label, text in parts for row in _part_rows(label, text, inner)]
    rows += [*_bar(account["parts"], inner), *_own_cost(account.get("telemetry")), printable(address)[:inner]]
    framed = [f"│ {row:{inner}} │" for row in rows]
    code = _COLOURS.get(severity) if colour else None
    headed = [
        f"│ \x1b[{code}m{row:{inner}}\x1b[0m │" if code else f"│ {row:{inner}} │" for row in _wrapped(heading, inner)
    ]
    title = " ddpobs: interrupted " if state == "interrupted" else " ddpobs "
    return [f"┌─{title}{'─' * (inner + 1 - len(title))}┐", *headed, *framed, f"└{'─' * (inner + 2)}┘"]


def in_ascii(lines: Sequence[str]) -> list[str]:
    """The same lines for a stream that cannot encode the frame and the bar."""
    return [line.translate(_ASCII).encode("ascii", "backslashreplace").decode() for line in lines]


def _finding(findings: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, str]], str]:
    """Heading, parts and severity of the worst finding."""
    worst, *others = findings
    more = f" ({len(others)} more)" if others else ""
    return finding_heading(worst) + more, finding_lines(worst), worst["severity"]


def _part_rows(label: str, text: str, inner: int) -> list[str]:
    if not label:
        return _wrapped(text, inner)
    lines = _wrapped(text, inner - LABEL_COLUMNS)
    return [labelled("" if index else label, line) for index, line in enumerate(lines)]


def _wrapped(text: str, columns: int) -> list[str]:
    return textwrap.wrap(printable(text), columns, max_lines=MAX_PART_ROWS, placeholder=" …")


def _own_cost(cost: Mapping[str, Any] | None) -> list[str]:
    """What telemetry adds to a step; nothing while it is not known."""
    return [labelled("cost", own_cost_text(cost))] if cost else []


def _bar(parts: Sequence[Mapping[str, Any]], inner: int) -> list[str]:
    """A bar of the largest shares of the wall time, and its legend; nothing while no share is known."""
    shares = Counter[str]()
    for part in parts:
        title = str(part["title"]).removeprefix("steps: ") if part["group"] == "steps" else part["group_title"]
        shares[title] += part["share"]
    ordered = shares.most_common()
    count = sum(share >= _MIN_SHARE for share in shares.values())
    for most in range(min(_MAX_NAMED_PARTS, count), 0, -1):
        rest = sum(share for _, share in ordered[most:])
        named = [*ordered[:most], *([("rest", rest)] if rest >= _MIN_SHARE else [])]
        signed = zip(_SIGNS, named, strict=False)
        legend = _packed([f"{sign} {title} {percent(share)}" for sign, (title, share) in signed], inner - LABEL_COLUMNS)
        if 0 < len(legend) <= _MAX_LEGEND_ROWS:
            ends = [round(end * _BAR_CELLS) for end in accumulate(share for _, share in named)]
            cells = "".join(sign * (end - begin) for sign, begin, end in zip(_SIGNS, [0, *ends], ends, strict=False))
            return [labelled("time", cells), *(labelled("", row) for row in legend)]
    return []


def _packed(entries: Sequence[str], columns: int) -> list[str]:
    """The entries in rows of at most so many columns."""
    rows: list[str] = []
    for entry in entries:
        if rows and len(rows[-1]) + len(entry) + 2 <= columns:
            rows[-1] += f"  {entry}"
        else:
            rows.append(entry)
    return rows if all(len(row) <= columns for row in rows) else []
