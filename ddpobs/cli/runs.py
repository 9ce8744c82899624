"""`ddpobs list` and `ddpobs open`: find a run, and show its page."""

from __future__ import annotations

import json
import time
import webbrowser
from contextlib import suppress
from typing import Annotated, Any

import typer

from ddpobs.cli.app import (
    LOOK,
    CollectorOption,
    JsonOption,
    RunArgument,
    ask,
    chosen_run,
    coloured,
    main,
    settings,
    terminal_columns,
)
from ddpobs.client.reader import page_address, read
from ddpobs.config import TelemetryConfig
from ddpobs.errors import CollectorError
from ddpobs.shared.quantities import time_of_day
from ddpobs.shared.words import shown_findings
from ddpobs.wire import printable
from ddpobs.wire.states import OVER, RUN_STATES

_TITLES = ("run", "state", "ranks", "steps", "started (UTC)", "worst finding")
_STATE, _STARTED, _WORST = (_TITLES.index(title) for title in ("state", "started (UTC)", "worst finding"))
_DIAGNOSES_S = 3.0
"""Maximum time that the list waits for diagnoses."""


@main.command("runs", hidden=True)
@main.command("list", rich_help_panel=LOOK, short_help="List the newest runs.")
def list_runs(
    collector: CollectorOption = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Most runs.")] = 20,
    state: Annotated[str | None, typer.Option(help=f"Only runs in this state: {', '.join(RUN_STATES)}.")] = None,
    search: Annotated[
        str, typer.Option(help="Only runs whose name, host, note or #tag has each of these words.", show_default=False)
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """List the newest runs with their state and worst finding."""
    conditions = {name: value for name, value in (("state", state), ("search", search)) if value}
    config = settings(collector)
    runs = ask(config, "/runs", {"limit": str(limit), **conditions}).document["runs"]
    if as_json:
        typer.echo(json.dumps(runs, indent=2))
    elif runs:
        _diagnose(config, runs)
        severities = [(run["diagnosis"] or {}).get("severity") or "" for run in runs]
        for line in _table([_row(run) for run in runs], severities):
            typer.echo(line)
    else:
        typer.echo(f"ddpobs: no run at {config.collector} {'matches' if conditions else 'yet'}", err=True)


@main.command("open", rich_help_panel=LOOK, short_help="Open a run's page in the browser.")
def open_page(run_id: RunArgument = None, collector: CollectorOption = None) -> None:
    """Open a run's page in the browser, and print its address."""
    config = settings(collector)
    address = page_address(config.collector, chosen_run(config, run_id))
    typer.echo(address)
    webbrowser.open(address)


def _diagnose(config: TelemetryConfig, runs: list[dict[str, Any]]) -> None:
    """Fill in the worst finding of runs that the collector has not diagnosed since its start."""
    until = time.monotonic() + _DIAGNOSES_S
    for run in runs:
        if run["diagnosis"] is None and _has_findings(run) and time.monotonic() < until:
            with suppress(CollectorError):
                diagnosis = read(config, f"/runs/{run['run']}/diagnostics", None, _DIAGNOSES_S).document
                worst = next(iter(shown_findings(diagnosis)), {})
                known = {"worst": worst.get("verdict"), "severity": worst.get("severity")}
                run["diagnosis"] = known | {"summary": diagnosis["summary"]}


def _has_findings(run: dict[str, Any]) -> bool:
    return bool(run["steps"] or run["state"] in OVER)  # A run may fail before its first step.


def _row(run: dict[str, Any]) -> list[str]:
    diagnosis = run["diagnosis"]
    if diagnosis is None:
        worst = f"not diagnosed yet: ddpobs report {run['run']}" if _has_findings(run) else "no step yet"
    else:
        worst = diagnosis["worst"] or diagnosis["summary"]
    began_ns = run.get("began_ns", run["created_ns"])  # An older collector has no begin.
    began = "–" if began_ns is None else time_of_day(began_ns)[: len("2026-11-28 23:10")]
    cells = [run["run"], run["state"], str(run["ranks"]), str(run["steps"]), began, worst]
    return [printable(cell) for cell in cells]


def _table(rows: list[list[str]], severities: list[str]) -> list[str]:
    """Aligned lines; the last column is cut at the terminal's width, and has the colour of its severity.

    A terminal that is too narrow shows no start: the runs are in its order.
    """
    widths = [max(map(len, column)) for column in zip(_TITLES, *rows, strict=True)]
    room = terminal_columns()
    if sum(widths) + 2 * (len(widths) - 1) > room:
        widths[_STARTED] = 0
    others = sum(width + 2 for width in widths[:-1] if width)
    widths[-1] = max(len(_TITLES[-1]), min(widths[-1], room - others))
    lines = []
    for row, severity in zip(([*_TITLES], *rows), ("", *severities), strict=True):
        cells = [f"{_cut(cell, width):{width}}" for cell, width in zip(row, widths, strict=True)]
        cells[_STATE] = coloured(cells[_STATE], row[_STATE])
        cells[_WORST] = coloured(cells[_WORST].rstrip(), severity) if severity else cells[_WORST].rstrip()
        lines.append("  ".join(cell for cell, width in zip(cells, widths, strict=True) if width))
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"
