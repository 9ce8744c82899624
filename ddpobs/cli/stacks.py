"""`ddpobs stacks`: the last known place and stacks of each rank, also of a hang in which a run was ended."""

from __future__ import annotations

from typing import Any

import typer

from ddpobs.cli.app import LOOK, CollectorOption, RunArgument, ask, chosen_run, hanging, main, settings
from ddpobs.shared.quantities import counted
from ddpobs.shared.words import bucket_title
from ddpobs.wire import printable
from ddpobs.wire.endings import IMPORTED


@main.command(rich_help_panel=LOOK, short_help="Print the last place and stacks of each rank.")
def stacks(run_id: RunArgument = None, collector: CollectorOption = None) -> None:
    """Print the last known place and stacks of each rank of a run; the ranks' processes are not involved."""
    config = settings(collector)
    run = chosen_run(config, run_id)
    ranks = ask(config, f"/runs/{run}/ranks").document["ranks"]
    pulses = [rank.get(name) or {} for rank in ranks for name in ("pulse", "stuck_pulse")]
    in_buckets = any(pulse.get("activity") == "bucket" for pulse in pulses)
    titles = _titles(ask(config, f"/runs/{run}/layout").document["layouts"]) if in_buckets else {}
    for rank in ranks:
        title, *frames = _stack_lines(rank, titles)
        for line in [*hanging(title, "    "), *map(printable, frames)]:
            typer.echo(line)


def _titles(layouts: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """Names of the buckets, or of the units' collectives, of each module's latest layout."""
    return {
        (layout["module"], bucket["bucket"]): bucket["title"]
        for layout in layouts  # By revision.
        for bucket in layout["buckets"]
        if "title" in bucket  # Older collectors send none.
    }


def _stack_lines(rank: dict[str, Any], titles: dict[tuple[int, int], str]) -> list[str]:
    """Lines on one rank: its activity, and the frames of its threads with the innermost last."""
    title, pulse = f"rank {rank['rank']}", rank.get("pulse") or {}
    if host := rank.get("host"):
        title += f" on {host}"
    if rank.get("ended") == IMPORTED:
        return _dumped(f"rank {rank['rank']}", pulse)
    if not pulse:
        return [f"{title}: no pulse yet"]
    if stuck := _stuck_at_end(rank):
        pulse = stuck
    elif rank.get("ended") == "finished":
        return [f"{title}: finished after {counted(rank['steps'], 'step')}"]
    activity = " ".join(filter(None, [pulse.get("activity") or pulse["phase"], pulse.get("waits_in")]))
    if pulse.get("activity") == "bucket" and pulse["bucket"] not in (None, -1):  # Older collectors send -1.
        bucket = pulse.get("module") or 0, pulse["bucket"]
        activity = titles.get(bucket) or bucket_title(*bucket)
    title += f": {activity}, step {pulse['step']}, no progress for {pulse.get('idle_ns', 0) / 1e9:.0f} s"
    title += " until it was ended" if stuck else ""
    if place := pulse.get("place"):
        title += f" ({place})"
    lines = [title, *(f"  {frame}" for frame in pulse.get("stack") or ["no stack: a rank sends it once it is stuck"])]
    for thread, frames in (pulse.get("threads") or {}).items():
        lines += [f"  thread {thread}:", *(f"    {frame}" for frame in frames)]
    return lines


def _dumped(title: str, pulse: dict[str, Any]) -> list[str]:
    """Lines on a rank of imported files: a dump has no time of a wait, and nothing of a rank in no collective."""
    if not pulse.get("waits_in"):
        return [f"{title}: no stack, because its file shows no collective in which it waits"]
    place = f" ({pulse['place']})" if pulse["place"] else ""
    return [f"{title} waits in {pulse['waits_in']}{place}", *(f"  {frame}" for frame in pulse["stack"])]


def _stuck_at_end(rank: dict[str, Any]) -> dict[str, Any] | None:
    """Return the last pulse in which a rank was stuck, if its end came before it went on; None if it did not end so."""
    stuck: dict[str, Any] | None = rank.get("stuck_pulse")  # Older collectors have none.
    if stuck is None or rank["ended"] in ("", "finished") or rank["pulse"]["step"] > stuck["step"] + 1:
        return None
    return stuck
