"""`ddpobs check-hosts`: `ddpobs run` after a check of all hosts, which stops the launch if one is slow."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ddpobs.cli.app import TRAIN, CollectorOption, checked, main, settings
from ddpobs.cli.run import RunOption, start
from ddpobs.launch.host_check.order import Order


@main.command(
    "check-hosts",
    rich_help_panel=TRAIN,
    short_help="Run a training unless a host is slow.",
    context_settings={"allow_interspersed_args": False},
)
def check_hosts(  # noqa: PLR0917
    command: Annotated[list[str], typer.Argument(help="Command of the training, after `--`.")],
    seconds: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Duration of the measures.")] = 30.0,
    limit: Annotated[
        float, typer.Option(min=1.01, help="How many times slower than the others a slow host is at least.")
    ] = 1.2,
    disk: Annotated[
        Path | None, typer.Option(help="Folder for the disk writes; by default that of temporary files.")
    ] = None,
    collector: CollectorOption = None,
    run_id: RunOption = None,
) -> None:
    """Compare the hosts on all ranks before the script begins, then run it as `ddpobs run` does.

    If a host is slow in matrix products, memory copies, disk writes or the exchange of data, the script does not begin,
    and the exit status is 75.
    """
    config = settings(collector)
    order = Order(seconds, limit, str(disk or tempfile.gettempdir()))
    start(config, command, checked(config, run=run_id).run or "" if run_id is not None else None, order)
