"""`ddpobs list` and `ddpobs open`: find a run, and show its page."""

from __future__ import annotations

import json
import shutil
import sys
import webbrowser
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ddpobs.cli.app import CollectorOption, JsonOption, RunArgument, ask, chosen_run, coloured, main, settings
from ddpobs.client.reader import page_address
from ddpobs.wire import printable
from ddpobs.wire.states import RUN_STATES

_TITLES = ("run", "state", "ranks", "steps", "started (UTC)", "worst finding")
_STATE = _TITLES.index("state")


@main.command("runs", hidden=True)
@main.command("list")
def list_runs(
    collector: CollectorOption = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Most runs.")] = 20,
    state: Annotated[str | None, typer.Option(help=f"Only runs in this state: {', '.join(RUN_STATES)}.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the newest runs with their state and worst finding."""
    query = {"limit": str(limit)} | ({"state": state} if state else {})
    config = settings(collector)
    runs = ask(config, "/runs", query).document["runs"]
    if as_json:
        typer.echo(json.dumps(runs, indent=2))
    elif runs:
        for line in _table([_row(run) for run in runs]):
            typer.echo(line)
    else:
        typer.echo(f"ddpobs: no run at {config.collector} yet", err=True)


@main.command("open")
def open_page(run_id: RunArgument = None, collector: CollectorOption = None) -> None:
    """Open a run's page in the browser, and print its address."""
    config = settings(collector)
    address = page_address(config.collector, chosen_run(config, run_id))
    typer.echo(address)
    webbrowser.open(address)


def _row(run: dict[str, Any]) -> list[str]:
    diagnosis = run["diagnosis"]
    worst = "not diagnosed yet" if diagnosis is None else diagnosis["worst"] or "none"
    started = datetime.fromtimestamp(run["created_ns"] / 1e9, UTC)
    cells = [run["run"], run["state"], str(run["ranks"]), str(run["steps"]), f"{started:%Y-%m-%d %H:%M}", worst]
    return [printable(cell) for cell in cells]


def _table(rows: list[list[str]]) -> list[str]:
    """Aligned lines; the last column is cut at the terminal's width."""
    widths = [max(map(len, column)) for column in zip(_TITLES, *rows, strict=True)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    widths[-1] = max(len(_TITLES[-1]), min(widths[-1], room - sum(widths[:-1]) - 2 * (len(widths) - 1)))
    lines = []
    for row in ([*_TITLES], *rows):
        cells = [f"{cell[:width]:{width}}" for cell, width in zip(row, widths, strict=True)]
        cells[_STATE] = coloured(cells[_STATE], row[_STATE])
        lines.append("  ".join(cells).rstrip())
    return lines
