"""`ddpobs fleet`: where the rank time of all runs went, which hosts are slow in different jobs, and what got worse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ddpobs.cli.app import LOOK, CollectorOption, JsonOption, ask, coloured, hanging, main, settings
from ddpobs.shared.quantities import counted, three_digits
from ddpobs.shared.words import percent
from ddpobs.wire import printable

_ROWS = 10
_MIN_HOURS = 0.0001
"""Rank-hours below which a figure is noise."""
_TABLES = {"by_host": "host", "by_tag": "tag", "by_torch": "torch"}


@main.command(rich_help_panel=LOOK, short_help="Sum up all runs, and name slow hosts.")
def fleet(
    weeks: Annotated[int, typer.Option(min=1, max=104, help="Number of weeks, with the present one.")] = 12,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    as_json: JsonOption = False,
    collector: CollectorOption = None,
) -> None:
    """Sum up the rank-hours of all runs by week, cause, host, tag and version of torch.

    It names the hosts that are slow in different jobs, and the groups of runs that lose more than in the weeks before.
    """
    query = {"weeks": str(weeks)} | ({"tag": tag} if tag else {})
    document = ask(settings(collector), "/fleet", query).document
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    for line in _lines(document):
        typer.echo(line)


def _lines(fleet: dict[str, Any]) -> list[str]:
    goodput = "" if fleet["goodput"] is None else f", goodput {percent(fleet['goodput'])}"
    hours = f"{_hours(fleet['rank_hours'])} rank-hours, {_hours(fleet['lost_hours'])} of them lost{goodput}"
    weeks = counted(fleet["weeks"], "week")
    lines = [f"{counted(fleet['runs'], 'run')} in {weeks}: {hours}" if fleet["runs"] else f"no run in {weeks}"]
    lines += [coloured(printable(f"slow host: {host['text']}"), "warning") for host in fleet["slow_hosts"]]
    lines += [coloured(printable(f"worse: {found['text']}"), "warning") for found in fleet["regressions"]]
    lines += _table("lost by cause", [_cause(cause) for cause in fleet["causes"][:_ROWS]])
    lines += _table("week of", [[_week(week), *_sums(week)] for week in fleet["by_week"]], _HEADS)
    for name, title in _TABLES.items():
        lines += _table(title, [[row["name"], *_sums(row)] for row in fleet[name][:_ROWS]], _HEADS)
    return [*lines, *(line for reason in fleet["missing"] for line in hanging(f"not known: {reason}"))]


_HEADS = ("runs", "rank-hours", "lost", "goodput")


def _cause(cause: dict[str, Any]) -> list[str]:
    return [cause["title"], f"{_hours(cause['hours'])} h", percent(cause["share"], 1)]


def _week(week: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(week['began_ns'] / 1e9, UTC):%Y-%m-%d}"


def _sums(row: dict[str, Any]) -> list[str]:
    goodput = "not known" if row["goodput"] is None else percent(row["goodput"])
    return [f"{row['runs']:,}", _hours(row["rank_hours"]), _hours(row["lost_hours"]), goodput]


def _hours(hours: float) -> str:
    return f"under {_MIN_HOURS}" if 0 < hours < _MIN_HOURS else three_digits(hours)


def _table(title: str, rows: Sequence[Sequence[str]], heads: Sequence[str] = ()) -> list[str]:
    """Aligned lines under a title; none without rows."""
    if not rows:
        return []
    cells = [[title, *heads, *([""] * (len(rows[0]) - 1 - len(heads)))], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["", *(_line(row, widths) for row in cells)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
    return printable("  ".join([f"{row[0]:{widths[0]}}", *numbers])).rstrip()
