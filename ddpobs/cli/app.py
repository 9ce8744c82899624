"""The application of all commands, and the code that they share: options, settings, requests and errors.

Exit codes: 0 done, 1 the collector did not answer or refused, 2 wrong use, 3 the run is in the state that the caller
asked about (`report --fail-on`, `watch`, `compare --fail-over`), 4 that could not be decided.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typing_extensions import override

from ddpobs import __version__
from ddpobs.client.reader import Reply, read
from ddpobs.config import TelemetryConfig, from_environment
from ddpobs.errors import CollectorError, ConfigError
from ddpobs.terminal.announcer import shows_colour
from ddpobs.wire import printable
from ddpobs.wire.states import STATE_COLOURS

FAILED, WRONG_USE, BAD_STATE = 1, 2, 3
_COMPLETIONS = "200"
_COMPLETION_S = 1.0
_UNIT = re.compile(r"(?<=\d) (?=%|[mµn]?s\b|min\b|h\b|[kMG]?B\b)")
"""The space between a figure and its unit."""
_MIN_COLUMNS = 40
_COLOURS = {"critical": "red", "warning": "yellow", "info": "cyan"} | STATE_COLOURS
TRAIN, LOOK, SAVE = "Train", "Look at a run", "Save and send"
"""Groups of commands in the help."""
_EXAMPLES = """
**Examples**

$ ddpobs run -- torchrun --nproc-per-node 8 train.py

$ ddpobs report                     # the findings of the newest run

$ ddpobs compare before after --fail-over 3%
"""


class _InOrderOfUse(TyperGroup):
    """The commands in the order in which a user meets them; those that it does not name come last."""

    _ORDER = (
        "run",
        "check-hosts",
        "horovodrun",
        "list",
        "report",
        "watch",
        "open",
        "stacks",
        "compare",
        "whatif",
        "fleet",
        "trace",
        "export",
    )

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: self._ORDER.index(name) if name in self._ORDER else len(self._ORDER))


main = typer.Typer(
    cls=_InOrderOfUse,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Run a training with telemetry, and read what the collector found.",
    epilog=_EXAMPLES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddpobs {__version__}")
        raise typer.Exit


@main.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def complete_run(incomplete: str) -> list[str]:
    """Names of runs for the shell's completion; none if the collector does not answer at once."""
    with suppress(CollectorError, ConfigError):
        flag = os.environ.get("DDPOBS_TELEMETRY", "")
        config = from_environment({**os.environ, "DDPOBS_TELEMETRY": flag})
        runs = read(config, "/runs", {"limit": _COMPLETIONS}, _COMPLETION_S).document["runs"]
        return [run["run"] for run in runs if run["run"].startswith(incomplete)]
    return []


CollectorOption = Annotated[
    str | None,
    typer.Option("--collector", help="Address; by default DDPOBS_TELEMETRY, or http://127.0.0.1:8321."),
]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="By default the newest run.", autocompletion=complete_run)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the collector's JSON.")]


def settings(collector: str | None) -> TelemetryConfig:
    """Settings of the environment, with the collector of the command line."""
    flag = os.environ.get("DDPOBS_TELEMETRY", "")
    try:
        config = from_environment({**os.environ, "DDPOBS_TELEMETRY": flag})
    except ConfigError as error:
        fail(str(error), WRONG_USE)
    return config if collector is None else checked(config, collector=collector)


def checked(config: TelemetryConfig, **changes: Any) -> TelemetryConfig:
    """Return settings with changes; an invalid value ends the command."""
    try:
        return replace(config, **changes)
    except ConfigError as error:
        fail(str(error), WRONG_USE)


def chosen_run(config: TelemetryConfig, run: str | None) -> str:
    """Name of the run on the command line, or of the newest run."""
    if run is not None:
        return checked(config, run=run).run or ""
    runs = ask(config, "/runs", {"limit": "1"}).document["runs"]
    if not runs:
        fail(f"no run has reported to {config.collector} yet", FAILED)
    newest: str = runs[0]["run"]
    return newest


def ask(config: TelemetryConfig, path: str, query: Mapping[str, str] | None = None) -> Reply:
    """Read a JSON document from the collector; any other reply ends the command."""
    try:
        return read(config, path, query)
    except CollectorError as error:
        fail(str(error), FAILED)


def coloured(text: str, word: str) -> str:
    """The text in the colour of a severity or a state, if stdout is a terminal with colours."""
    return typer.style(text, fg=_COLOURS.get(word), bold=True) if shows_colour(sys.stdout) else text


def terminal_columns() -> int:
    """Columns of the terminal; a file or a pipe has as many as a line needs."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def wrapped(text: str, indent: int = 0) -> list[str]:
    """The text, made printable, in lines that fit the terminal beside an indent; a figure stays with its unit."""
    joined = _UNIT.sub("\u00a0", printable(text))
    lines = textwrap.wrap(joined, max(_MIN_COLUMNS, terminal_columns() - indent), break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines] or [""]


def hanging(text: str, indent: str = "  ") -> list[str]:
    """The same lines, indented after the first."""
    first, *more = wrapped(text, len(indent))
    return [first, *(indent + line for line in more)]


def echo(text: str, word: str = "") -> None:
    """Print a text in the colour of a severity or a state, wrapped; the lines after the first are indented."""
    for line in hanging(text):
        typer.echo(coloured(line, word) if word else line)


def fail(message: str, code: int) -> NoReturn:
    """Print an error and end the command."""
    typer.echo(f"ddpobs: {message}", err=True)
    raise typer.Exit(code)
