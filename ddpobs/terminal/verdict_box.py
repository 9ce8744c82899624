"""The box at the end of a training: verdict, reason, remedy, gain, phases as a bar, and the run's address."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ddpobs.wire import printable

MOST_LINES = 10
"""Most lines of the box, its frame included."""
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 110
_BAR_CELLS = 40
_NAMED_PARTS = 4
"""Most parts in the legend, besides the rest; fewer where they do not fit."""
_LABEL = 8
"""Width of the labels' column."""
_GROUPS = {
    "outside": "outside of steps",
    "start_up": "start-up",
    "restarts": "restarts",
    "idle": "idle",
    "not_known": "not known",
}
_SIGNS = "█▓▒░▞"
"""Fill of each part of the bar, in the order of the legend."""
_ASCII = str.maketrans("┌┐└┘─│█▓▒░▞±→…", "++++-|#=+.:~>.")
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
    """Lines of the box, at most `MOST_LINES`.

    Args:
        diagnosis: The collector's diagnostics of the run.
        account: The collector's account of the run's wall time.
        address: Address of the run's page.
        columns: Width of the terminal, in characters.
        colour: Whether the terminal shows colours.
        state: The run's state; the frame shows an interrupt, which has no finding.
    """
    inner = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, columns)) - 4
    findings: Sequence[Mapping[str, Any]] = diagnosis["findings"]
    rows = _finding_rows(findings, inner) if findings else _no_finding_rows(diagnosis)
    rows += _bar(account["parts"], inner)
    rows = [*rows[: MOST_LINES - 3], address]
    rows = [printable(row)[:inner] for row in rows]
    framed = [f"│ {row:{inner}} │" for row in rows]
    if colour and findings and (code := _COLOURS.get(findings[0]["severity"])):
        framed[0] = f"│ \x1b[{code}m{rows[0]:{inner}}\x1b[0m │"
    title = " ddpobs: interrupted " if state == "interrupted" else " ddpobs "
    return [f"┌─{title}{'─' * (inner + 1 - len(title))}┐", *framed, f"└{'─' * (inner + 2)}┘"]


def in_ascii(lines: Sequence[str]) -> list[str]:
    """The same lines for a stream that cannot encode the frame and the bar."""
    return [line.translate(_ASCII).encode("ascii", "backslashreplace").decode() for line in lines]


def _finding_rows(findings: Sequence[Mapping[str, Any]], inner: int) -> list[str]:
    """Rows on the worst finding; its title has the verdict up to a colon or a full stop, and then the reason."""
    worst = findings[0]
    verdict, reason = [*re.split(r": |\. ", worst["title"], maxsplit=1), ""][:2]
    more = f" ({len(findings) - 1} more)" if len(findings) > 1 else ""
    rows = [_cut(f"{worst['severity']}: {verdict}", inner - len(more)) + more]
    remedy = _wrapped("do", worst["remedy"], inner, 2)
    rows += _wrapped("why", reason, inner, 3 - len(remedy)) + remedy
    gain = worst["gain"]
    if gain:
        whole = "the run's wall time" if gain["whole"] == "run" else "every step"
        most = "at most " if gain["whole"] == "run" else ""
        rows.append(f"{'gain':{_LABEL}}{most}{gain['ratio']:.0%} of {whole}")
    return rows


def _no_finding_rows(diagnosis: Mapping[str, Any]) -> list[str]:
    rows = [f"no finding in {diagnosis['steps_seen']} steps"]
    if diagnosis["missing"]:
        count = len(diagnosis["missing"])
        rows.append(f"{count} kind{'s' * (count != 1)} of finding could not be judged: `ddpobs report` has the reasons")
    return rows


def _wrapped(label: str, text: str, inner: int, most: int) -> list[str]:
    """A labelled text in at most so many rows."""
    lines = textwrap.wrap(text, inner - _LABEL)
    if len(lines) > most:
        lines = [*lines[: most - 1], _cut(f"{lines[most - 1]} {lines[most]}", inner - _LABEL)]
    return [f"{'' if index else label:{_LABEL}}{line}" for index, line in enumerate(lines)]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip(" ,;:") + "…"


def _bar(parts: Sequence[Mapping[str, Any]], inner: int) -> list[str]:
    """A bar of the largest shares of the wall time, and its legend; nothing while no share is known."""
    shares = Counter[str]()
    for part in parts:
        title = str(part["title"]).removeprefix("steps: ") if part["group"] == "steps" else _GROUPS[part["group"]]
        shares[title] += part["share"]
    ordered = [(title, share) for title, share in shares.most_common() if share > 0]
    for most in range(min(_NAMED_PARTS, len(ordered)), 0, -1):
        rest = sum(share for _, share in ordered[most:])
        named = [*ordered[:most], *([("rest", rest)] if rest else [])]
        legend = "  ".join(f"{sign} {title} {share:.0%}" for sign, (title, share) in zip(_SIGNS, named, strict=False))
        if len(legend) <= inner - _LABEL:
            ends = [round(end * _BAR_CELLS) for end in accumulate(share for _, share in named)]
            cells = "".join(sign * (end - begin) for sign, begin, end in zip(_SIGNS, [0, *ends], ends, strict=False))
            return [f"{'time':{_LABEL}}{cells}", f"{'':{_LABEL}}{legend}"]
    return []
