"""`ddpobs trace`: steps as a Chrome trace."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpobs.cli.app import FAILED, SAVE, WRONG_USE, CollectorOption, RunArgument, ask, chosen_run, fail, main, settings
from ddpobs.client.reader import Reply, read
from ddpobs.config import TelemetryConfig
from ddpobs.errors import CollectorError

_BINS = "1000"
_AROUND = 5
"""Steps before and after the slowest one."""
_WARM_UP = 5
"""Steps at the start of a run, which are slow in every run."""


@main.command(rich_help_panel=SAVE, short_help="Save steps as a trace for Perfetto.")
def trace(
    run_id: RunArgument = None,
    steps: Annotated[
        str | None, typer.Option(help="First and last step, as A:B; by default the slowest step and those around it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", help="File for the trace; by default RUN-A-B.json in this folder.")
    ] = None,
    collector: CollectorOption = None,
) -> None:
    """Save steps as a Chrome trace, for Perfetto or chrome://tracing."""
    bounds = None if steps is None else _bounds(steps)
    config = settings(collector)
    run = chosen_run(config, run_id)
    slowest = None
    if bounds is None:
        slowest = slowest_step(config, run)
        bounds = max(0, slowest - _AROUND), slowest + _AROUND
    reply = _trace(config, run, bounds, slowest)
    if not reply.document["traceEvents"]:
        fail(f"run {run} has none of the steps {bounds[0]} to {bounds[1]}", FAILED)
    bounds = _held(reply.document["traceEvents"], bounds)
    file = output or Path(f"{run}-{bounds[0]}-{bounds[1]}.json")
    try:
        file.write_bytes(reply.body)
    except OSError as error:
        fail(f"{file}: {error.strerror}", FAILED)
    around = "" if slowest is None else f", around the slowest one, {slowest}"
    typer.echo(f"{file}: steps {bounds[0]} to {bounds[1]}{around}. Open it at https://ui.perfetto.dev", err=True)


def slowest_step(config: TelemetryConfig, run: str) -> int:
    """The step with the longest mean wall time over the ranks, after the warm-up of a run that is longer."""
    path = f"/runs/{run}/steps"
    bins = ask(config, path, {"mean": "true", "points": _BINS}).document["columns"]
    if not bins["first"]:
        fail(f"run {run} has no steps yet", FAILED)
    first, last = bins["first"][0], bins["last"][-1]
    warm = first + _WARM_UP if last - first > 2 * _WARM_UP else first
    maxima = [
        (longest, begin, end)
        for longest, begin, end in zip(bins["wall_max_ns"], bins["first"], bins["last"], strict=True)
        if end >= warm
    ]
    _, begin, end = max(maxima)
    query = {"mean": "true", "from": str(max(warm, begin)), "to": str(end)}
    columns = ask(config, path, query).document["columns"]
    _, slowest = max(zip(columns["wall_ns"], columns["step"], strict=True), default=(0, max(warm, begin)))
    return int(slowest)


def _trace(config: TelemetryConfig, run: str, bounds: tuple[int, int], slowest: int | None) -> Reply:
    """Read the trace; if the steps around the slowest one are too many, that step and the next ones that fit."""
    query = {"from": str(bounds[0]), "to": str(bounds[1])}
    if slowest is None:
        return ask(config, f"/runs/{run}/trace", query)
    try:
        return read(config, f"/runs/{run}/trace", query)
    except CollectorError as error:
        if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
            fail(str(error), FAILED)
    return ask(config, f"/runs/{run}/trace", {"from": str(slowest)})


def _held(events: list[dict[str, Any]], bounds: tuple[int, int]) -> tuple[int, int]:
    """First and last step that the trace holds, of those that were requested."""
    steps = [event["args"]["step"] for event in events if "step" in event.get("args", {})]
    return max(bounds[0], min(steps, default=bounds[0])), min(bounds[1], max(steps, default=bounds[1]))


def _bounds(steps: str) -> tuple[int, int]:
    first, colon, last = steps.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        fail(f"--steps: expected A:B with A up to B, got {steps!r}", WRONG_USE)
    return int(first), int(last)
