"""`ddpobs watch`: a run while it trains."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddpobs.cli.app import BAD_STATE, FAILED, LOOK, CollectorOption, RunArgument, ask, chosen_run, fail, main, settings
from ddpobs.client.reader import read
from ddpobs.config import TelemetryConfig
from ddpobs.errors import CollectorError
from ddpobs.shared.words import LABEL_COLUMNS, finding_heading, finding_lines, labelled, shown_findings
from ddpobs.wire import OWN_PHASES, printable
from ddpobs.wire.endings import IMPORTED
from ddpobs.wire.states import OVER

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_RANKS, _MAX_FINDINGS = 16, 3
_WIDE = 110
"""Columns of a terminal that shows the phases of each rank, too."""
_MIN_WIDTHS = {"state": 11, "step": 7, "does": 12, "own ms": 7}
"""Columns whose values change: with them the table keeps its width."""
_AWAIT_S = 1.0
_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "cyan"}


@main.command(rich_help_panel=LOOK, short_help="Show a run while it trains.")
def watch(
    run_id: RunArgument = None,
    collector: CollectorOption = None,
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show a run while it trains: speed, ranks and findings. Ends with the run, with code 3 if it did not finish.

    Without a terminal, each change is a line.
    """
    config = settings(collector)
    run = chosen_run(config, run_id)
    look = _Look()
    _await(config, run)

    def refresh() -> _Look:
        path = f"/runs/{run}"
        return look.refreshed(
            ask(config, path).document,
            ask(config, f"{path}/ranks").document["ranks"],
            ask(config, f"{path}/diagnostics").document,
        )

    try:
        _watch_live(refresh, every) if sys.stdout.isatty() else _watch_lines(refresh, every)
    except KeyboardInterrupt:
        return
    if look.state != "finished":
        raise typer.Exit(BAD_STATE)


def _await(config: TelemetryConfig, run: str) -> None:
    """Wait until the run has reported."""
    told = False
    while True:
        try:
            read(config, f"/runs/{run}")
        except CollectorError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                fail(str(error), FAILED)
        else:
            return
        if not told:
            typer.echo(f"ddpobs: waiting for run {run}, which has not reported to {config.collector} yet", err=True)
            told = True
        time.sleep(_AWAIT_S)


class _Look:
    """The latest state of the run."""

    def __init__(self) -> None:
        self.steps, self.state = 0, ""
        self.run: dict[str, Any] = {}
        self.ranks: list[dict[str, Any]] = []
        self.findings: list[Mapping[str, Any]] = []
        self.summary = ""

    def refreshed(self, run: dict[str, Any], ranks: list[dict[str, Any]], diagnosis: dict[str, Any]) -> _Look:
        """Take in the collector's responses on the run, its ranks and its diagnosis."""
        self.steps, self.state = run["steps"], run["state"]
        self.run, self.ranks = run, ranks
        self.findings, self.summary = shown_findings(diagnosis), diagnosis["summary"]
        return self

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected; a run of imported dumps hangs for ever."""
        return self.state in OVER or IMPORTED in (self.run.get("hello") or {}).get("settings", {})

    @property
    def line(self) -> str:
        """State, steps and worst finding."""
        worst = self.findings[0]["verdict"] if self.findings else self.summary
        return printable(f"{self.run['run']}: {self.state}, step {self.steps}{self._step_time}: {worst}")

    @property
    def _step_time(self) -> str:
        """The mean step time of the slowest rank, without time between steps."""
        step_ns = max((sum(times.values()) for rank in self.ranks if (times := rank["phases_ns"])), default=0)
        return f", {step_ns / 1e6:.1f} ms a step" if step_ns else ""

    def screen(self, columns: int) -> RenderableType:
        """The ranks as a table, with the parts of the worst finding and the verdicts of the next ones below."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        title = printable(f"{self.run['run']}: {self.state}, step {self.steps}{self._step_time}")
        table = Table(title=escape(title), title_justify="left", title_style="bold")
        phases = OWN_PHASES if columns >= _WIDE else ()
        for name in ("rank", "host", "state", "step", "does", "own ms", *(f"{phase} ms" for phase in phases)):
            is_text, width = name in ("host", "state", "does"), _MIN_WIDTHS.get(name)
            table.add_column(name, justify="left" if is_text else "right", min_width=width, no_wrap=True)
        slowest = max((rank["own_ns"] or 0 for rank in self.ranks), default=0)
        shown = sorted(self.ranks, key=lambda rank: -(rank["own_ns"] or 0))[:_MAX_RANKS]
        for rank in sorted(shown, key=lambda rank: int(rank["rank"])):
            is_slowest = len(self.ranks) > 1 and rank["own_ns"] == slowest > 0
            table.add_row(*map(escape, _cells(rank, phases)), style="bold" if is_slowest else "")
        if len(self.ranks) > _MAX_RANKS:
            table.caption = f"the {_MAX_RANKS} ranks with the longest own time of {len(self.ranks)}"
        findings = self.findings[:_MAX_FINDINGS]
        lines = [f"[{_STYLES[each['severity']]}]{escape(printable(finding_heading(each)))}[/]" for each in findings]
        worst = finding_lines(findings[0]) if findings else []
        lines[1:1] = [escape(line) for label, text in worst for line in _indented(label, printable(text), columns)]
        return Group(table, *map(Text.from_markup, lines or [escape(printable(self.summary))]))


def _indented(label: str, text: str, columns: int) -> list[str]:
    rows = textwrap.wrap(text, max(20, columns - LABEL_COLUMNS - 2)) or [""]
    return [f"  {labelled('' if row else label, line)}" for row, line in enumerate(rows)]


def _cells(rank: dict[str, Any], shown: Sequence[str]) -> list[str]:
    pulse, phases = rank["pulse"] or {}, rank["phases_ns"] or {}
    values = [rank["own_ns"], *(phases.get(name) for name in shown)]
    times = ["" if value is None else f"{value / 1e6:.1f}" for value in values]
    phase = pulse.get("phase", "") if rank["state"] in ("running", "hung") else ""
    texts = [str(rank["rank"]), rank["host"] or "", rank["state"], str(rank["last_step"]), phase]
    return [printable(text) for text in (*texts, *times)]


def _watch_live(refresh: Any, every_s: float) -> None:
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        while True:
            look = refresh()
            live.update(look.screen(live.console.width), refresh=True)
            if look.is_over:
                return
            time.sleep(every_s)


def _watch_lines(refresh: Any, every_s: float) -> None:
    printed = ""
    while True:
        look = refresh()
        if look.line != printed:
            printed = look.line
            typer.echo(printed)
        if look.is_over:
            return
        time.sleep(every_s)
