"""`ddpobs run`: a command and its child processes with telemetry."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import ddpobs
from ddpobs.cli.app import TRAIN, CollectorOption, checked, main, settings
from ddpobs.config import TelemetryConfig
from ddpobs.export.spool import folder_of
from ddpobs.launch.host_check.order import VARIABLE, Order
from ddpobs.launch.start import run_plain, supervise
from ddpobs.recording.place.last_place import FOLDER

RunOption = Annotated[str | None, typer.Option("--run", help="Run id; by default DDPOBS_RUN, or the launcher's.")]


@main.command(
    rich_help_panel=TRAIN,
    short_help="Run a training with telemetry.",
    context_settings={"allow_interspersed_args": False},
)
def run(
    command: Annotated[list[str], typer.Argument(help="Command of the training, after `--`.")],
    collector: CollectorOption = None,
    run_id: RunOption = None,
) -> None:
    """Run a command and its child processes with telemetry.

    It reports ranks that are killed or raise before their model is built, and a command that fails before. It ends as
    the command does, with its exit status or by its signal. With DDPOBS_TELEMETRY=0 and no `--collector` the command
    runs without telemetry.
    """
    if collector is None and os.environ.get("DDPOBS_TELEMETRY", "").strip() == "0":
        if os.environ.get("DDPOBS_QUIET", "").strip() != "1":  # Not by `settings`: a wrong one must not stop this.
            _say("no telemetry, because DDPOBS_TELEMETRY is 0")
        run_plain(command, _say)
    config = settings(collector)
    start(config, command, checked(config, run=run_id).run or "" if run_id is not None else None)


def start(
    config: TelemetryConfig, command: list[str], run_id: str | None = None, check: Order | None = None
) -> NoReturn:
    """Become the supervisor of a command with telemetry.

    Args:
        config: The settings.
        command: The program and its arguments.
        run_id: The run; None for the environment's.
        check: What the ranks check before the script begins; None for nothing.
    """
    os.environ.pop(VARIABLE, None)
    if check is not None:
        os.environ[VARIABLE] = check.text()
    environ = dict(os.environ, DDPOBS_TELEMETRY=config.collector)
    if run_id is not None:
        environ["DDPOBS_RUN"] = run_id
    autoload = str(Path(ddpobs.__file__).parent / "autoload")
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (autoload, os.environ.get("PYTHONPATH"))))
    own_environ = environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    places = folder_of(config.spool).absolute() / FOLDER
    supervise(
        command,
        environ,
        own_environ,
        places,
        _say,
        keep_output=config.traceback,
    )


def _say(text: str) -> None:
    typer.echo(f"ddpobs: {text}", err=True)
