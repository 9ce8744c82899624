"""`ddpobs run`: a command and its child processes with telemetry."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import ddpobs
from ddpobs.cli.app import CollectorOption, checked, fail, main, settings

_NOT_STARTED = 127


@main.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="Command of the training, after `--`.")],
    collector: CollectorOption = None,
    run_id: Annotated[
        str | None, typer.Option("--run", help="Run id; by default DDPOBS_RUN, or the launcher's.")
    ] = None,
) -> None:
    """Run a command and its child processes with telemetry."""
    config = settings(collector)
    environ = dict(os.environ, DDPOBS_TELEMETRY=config.collector)
    if run_id is not None:
        environ["DDPOBS_RUN"] = checked(config, run=run_id).run or ""
    autoload = str(Path(ddpobs.__file__).parent / "autoload")
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (autoload, os.environ.get("PYTHONPATH"))))
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        fail(f"{command[0]}: {error.strerror}", _NOT_STARTED)
