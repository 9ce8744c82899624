"""`ddpobs import`: make a run of traces."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Annotated

import typer
import zstandard

from ddpobs import wire
from ddpobs.cli.app import FAILED, SAVE, WRONG_USE, CollectorOption, checked, fail, main, settings
from ddpobs.cli.progress import progress
from ddpobs.client.reader import page_address
from ddpobs.errors import TraceFileError
from ddpobs.export.http_sender import Outcome, Sender, pause_s
from ddpobs.imports import kineto
from ddpobs.imports.flight_recorder import is_dump, verdicts
from ddpobs.imports.flight_recorder import read as read_dump
from ddpobs.imports.imported_run import ImportedRun, numbered
from ddpobs.imports.rank_trace import RankTrace
from ddpobs.shared.words import format_ranks
from ddpobs.wire import printable

_TRIES = 3
_FORMAT = "torch.profiler"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@main.command("import", rich_help_panel=SAVE, short_help="Make a run of torch.profiler's traces.")
def import_traces(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Traces of torch.profiler or dumps of the Flight Recorder, one of each rank.",
        ),
    ],
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; by default of the first file.")] = None,
    collector: CollectorOption = None,
) -> None:
    """Make a run of traces that torch.profiler wrote, and name the rank that arrived last.

    Of dumps of torch's Flight Recorder, tell which rank did not come to the collective that the others wait in.
    """
    if any(is_dump(file) for file in files if file.is_file()):
        _tell_hang(files)
        return
    config = checked(settings(collector), run=run or _name(files[0]))
    try:
        imported = ImportedRun(numbered(_read(files)), config.run or "", _FORMAT)
    except TraceFileError as error:
        fail(str(error), WRONG_USE)
    _print(imported, config.run or "")
    sender = Sender(config)
    try:
        for batch in imported.batches():
            _send(sender, batch)
    finally:
        sender.close()
    typer.echo(page_address(config.collector, config.run or ""))


def _tell_hang(files: list[Path]) -> None:
    """Print what dumps show. They have no steps, so they make no run."""
    try:
        found = verdicts([read_dump(file) for file in files])
    except TraceFileError as error:
        fail(str(error), WRONG_USE)
    if not found:
        typer.echo("no rank waits in a collective")
    for verdict in found:
        typer.echo(printable(verdict.verdict))
        typer.echo(printable(f"cause: {verdict.cause}"))


def _read(files: list[Path]) -> list[RankTrace]:
    total = sum(file.stat().st_size for file in files if file.exists())
    with progress("reading", total) as advance:
        traces = []
        for file in files:
            before = 0

            def moved(at: int) -> None:
                nonlocal before
                advance(at - before)
                before = at

            traces.append(kineto.read(file, moved))
    return traces


def _print(imported: ImportedRun, run: str) -> None:
    counts = [len(steps) for steps in imported.steps]
    typer.echo(f"run {run}: {max(counts)} steps of {format_ranks(imported.ranks)}")
    for one in imported.arrivals:
        late = f"{one.delay_ns / 1e6:.3g} ms after the others (median), most of it in {one.phase}"
        typer.echo(f"rank {one.rank} arrived last in {one.last} of {one.steps} steps: {late}")


def _send(sender: Sender, batch: wire.Batch) -> None:
    body = zstandard.compress(wire.encode(batch), 1)
    for tries in range(_TRIES):
        response = sender.send(batch.run, batch.source, batch.seq, body)
        if response.outcome in (Outcome.STORED, Outcome.REPEATED):
            return
        if response.outcome is not Outcome.RETRY:
            break
        if tries + 1 < _TRIES:
            time.sleep(pause_s(tries, response.retry_after_s, random.Random()))
    fail(printable(response.detail), FAILED)


def _name(file: Path) -> str:
    """Name of a run after its file, without the file's endings."""
    stem = file.name.removesuffix(".gz").removesuffix(".json").removesuffix(".pt.trace")
    return _NOT_IN_NAMES.sub("-", stem).strip("-.")[:100] or "imported"
