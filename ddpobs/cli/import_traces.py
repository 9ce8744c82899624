"""`ddpobs import`: make a run of files."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path
from typing import Annotated

import typer

from ddpobs import wire
from ddpobs.cli.app import FAILED, SAVE, WRONG_USE, CollectorOption, checked, fail, main, settings
from ddpobs.cli.progress import progress
from ddpobs.client.reader import page_address
from ddpobs.errors import TraceFileError
from ddpobs.export.http_sender import Outcome, Response, Sender, pause_s
from ddpobs.imports.files import encoded, read
from ddpobs.wire import printable

_TRIES = 3
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@main.command("import", rich_help_panel=SAVE, short_help="Make a run of traces, dumps or exported files.")
def import_traces(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Files of one format, such as a torch.profiler trace of each rank."),
    ],
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; by default of the first file.")] = None,
    collector: CollectorOption = None,
) -> None:
    """Make a run of files that others recorded, and name the rank that arrived last or did not come.

    Formats: traces of torch.profiler, dumps of torch's Flight Recorder, timelines of Horovod, logs of NCCL Inspector,
    Parquet of StragglerAnalysis and of `ddpobs export`. The lines about the ranks need no collector.
    """
    config = checked(settings(collector), run=run or _name(files[0]))
    lines, batches = _read(files, config.run or "")
    for line in lines:
        typer.echo(printable(line))
    sender = Sender(config)
    try:
        for batch, body in batches:
            response = _send(sender, batch, body)
            if response.outcome is Outcome.RETRY and collector is None and not os.environ.get("DDPOBS_TELEMETRY"):
                typer.echo(
                    f"ddpobs: not stored: no collector at {config.collector}: ddpobs-server starts one", err=True
                )
                return
            if response.outcome not in (Outcome.STORED, Outcome.REPEATED):
                fail(printable(response.detail), FAILED)
    finally:
        sender.close()
    typer.echo(page_address(config.collector, config.run or ""))


def _read(files: list[Path], run: str) -> tuple[list[str], list[tuple[wire.Batch, bytes]]]:
    """What the files show, and all batches: none is sent before each is known to be right."""
    total = sum(file.stat().st_size for file in files if file.exists())
    try:
        with progress("reading", total) as advance:
            imported = read(files, run, advance)
            return imported.lines, list(encoded(imported))
    except TraceFileError as error:
        fail(printable(str(error)), WRONG_USE)


def _send(sender: Sender, batch: wire.Batch, body: bytes) -> Response:
    for tries in range(_TRIES):
        response = sender.send(batch.run, batch.source, batch.seq, body)
        if response.outcome is not Outcome.RETRY or tries + 1 == _TRIES:
            break
        time.sleep(pause_s(tries, response.retry_after_s, random.Random()))
    return response


def _name(file: Path) -> str:
    """Name of a run after its file, without the file's endings."""
    stem = file.name.removesuffix(".gz").removesuffix(".json").removesuffix(".pt.trace")
    return _NOT_IN_NAMES.sub("-", stem).strip("-.")[:100] or "imported"
