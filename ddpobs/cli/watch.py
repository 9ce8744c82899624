"""`ddpobs watch`: a run while it trains."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddpobs.cli.app import BAD_STATE, CollectorOption, RunArgument, ask, chosen_run, main, settings
from ddpobs.shared.words import finding_heading, finding_lines, labelled
from ddpobs.wire import OWN_PHASES, printable
from ddpobs.wire.states import OVER

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_RANKS, _MAX_FINDINGS = 16, 3
_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "cyan"}


@main.command()
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
    look = _Look(time.monotonic())

    def refresh() -> _Look:
        path = f"/runs/{run}"
        return look.refreshed(
            ask(config, path).document,
            ask(config, f"{path}/ranks").document["ranks"],
            ask(config, f"{path}/diagnostics").document["findings"],
        )

    try:
        _watch_live(refresh, every) if sys.stdout.isatty() else _watch_lines(refresh, every)
    except KeyboardInterrupt:
        return
    if look.state != "finished":
        raise typer.Exit(BAD_STATE)


class _Look:
    """The latest state of the run, and the speed since the look before."""

    def __init__(self, at_s: float) -> None:
        self.at_s, self.steps, self.state = at_s, -1, ""
        self.rate: float | None = None
        self.run: dict[str, Any] = {}
        self.ranks: list[dict[str, Any]] = []
        self.findings: list[dict[str, Any]] = []

    def refreshed(self, run: dict[str, Any], ranks: list[dict[str, Any]], findings: list[dict[str, Any]]) -> _Look:
        """Take in the collector's responses."""
        now_s = time.monotonic()
        if self.steps >= 0 and run["steps"] > self.steps:
            self.rate = (run["steps"] - self.steps) / (now_s - self.at_s)
        if run["steps"] != self.steps:
            self.at_s, self.steps = now_s, run["steps"]
        self.run, self.ranks, self.findings, self.state = run, ranks, findings, run["state"]
        return self

    @property
    def line(self) -> str:
        """State, steps and worst finding."""
        worst = self.findings[0]["verdict"] if self.findings else "no finding"
        return printable(f"{self.run['run']}: {self.state}, step {self.steps}{self._rate}: {worst}")

    @property
    def _rate(self) -> str:
        return "" if self.rate is None else f", {self.rate:.1f} steps/s"

    def screen(self) -> RenderableType:
        """The ranks as a table, with the parts of the worst finding and the verdicts of the next ones below."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        title = printable(f"{self.run['run']}: {self.state}, step {self.steps}{self._rate}")
        table = Table(title=escape(title), title_justify="left", title_style="bold")
        for name in ("rank", "host", "state", "step", "does", "own ms", *(f"{phase} ms" for phase in OWN_PHASES)):
            table.add_column(name, justify="left" if name in ("host", "state", "does") else "right")
        slowest = max((rank["own_ns"] or 0 for rank in self.ranks), default=0)
        shown = sorted(self.ranks, key=lambda rank: -(rank["own_ns"] or 0))[:_MAX_RANKS]
        for rank in sorted(shown, key=lambda rank: int(rank["rank"])):
            is_slowest = len(self.ranks) > 1 and rank["own_ns"] == slowest > 0
            table.add_row(*map(escape, _cells(rank)), style="bold" if is_slowest else "")
        if len(self.ranks) > _MAX_RANKS:
            table.caption = f"the {_MAX_RANKS} ranks with the longest own time of {len(self.ranks)}"
        findings = self.findings[:_MAX_FINDINGS]
        lines = [f"[{_STYLES[each['severity']]}]{escape(printable(finding_heading(each)))}[/]" for each in findings]
        worst = finding_lines(findings[0]) if findings else []
        lines[1:1] = [escape(printable(f"  {labelled(label, text)}")) for label, text in worst]
        return Group(table, *map(Text.from_markup, lines or ["no finding"]))


def _cells(rank: dict[str, Any]) -> list[str]:
    pulse, phases = rank["pulse"] or {}, rank["phases_ns"] or {}
    values = [rank["own_ns"], *(phases.get(name) for name in OWN_PHASES)]
    times = ["" if value is None else f"{value / 1e6:.1f}" for value in values]
    phase = pulse.get("phase", "") if rank["state"] in ("running", "hung") else ""
    texts = [str(rank["rank"]), rank["host"] or "", rank["state"], str(rank["last_step"]), phase]
    return [printable(text) for text in (*texts, *times)]


def _watch_live(refresh: Any, every_s: float) -> None:
    from rich.live import Live

    with Live(refresh().screen(), auto_refresh=False) as live:
        while (look := refresh()).state not in OVER:
            live.update(look.screen(), refresh=True)
            time.sleep(every_s)
        live.update(look.screen(), refresh=True)


def _watch_lines(refresh: Any, every_s: float) -> None:
    printed = ""
    while True:
        look = refresh()
        if look.line != printed:
            printed = look.line
            typer.echo(printed)
        if look.state in OVER:
            return
        time.sleep(every_s)
