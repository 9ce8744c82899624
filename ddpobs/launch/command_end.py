"""Report of a command that failed before any of its ranks reported itself: how it ended, and its last lines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping

from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.launch.lone_event import batch_with_event
from ddpobs.launch.output import MAX_BYTES
from ddpobs.recording.place.early_place import early_run_name, rank_of
from ddpobs.recovery import signal_name

STAGE = "command"
"""Stage of a command's end, which is no rank's."""
_MAX_LINES, _MAX_CHARACTERS = 20, 4000
_CONTROL = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
"""Sequences that colour a terminal's text, move its cursor or set its title."""

_BOX = re.compile(r"^(?:┌─|\+-) ddpobs.*?^[└+][─-]+[┘+]\r?\n", re.MULTILINE | re.DOTALL)
"""The verdict that an earlier training of the command printed."""


def last_lines(output: bytes) -> str:
    """Return the last lines of an output as text, at most 20 and at most 4,000 characters.

    Of a line that was written over, such as a progress bar, the last state is kept. The box of ddpobs is left out.
    """
    text = _BOX.sub("", _CONTROL.sub("", output.decode(errors="replace")))
    lines = [line.rstrip("\r").rpartition("\r")[2].expandtabs(4).rstrip() for line in text.split("\n")]
    if len(output) >= MAX_BYTES:
        lines = lines[1:]  # The first one is cut.
    kept = [wire.printable(line) for line in lines if line][-_MAX_LINES:]
    return "\n".join(kept)[-_MAX_CHARACTERS:]


def command_batch(  # noqa: PLR0917
    config: TelemetryConfig, environ: Mapping[str, str], script: str, status: int, oom_kills: int, output: str
) -> wire.Batch | None:
    """Return the batch that reports a command's end; None for one that a person interrupted.

    Args:
        config: The settings.
        environ: The environment of the `ddpobs run`, with its launch.
        script: Name of the command's script.
        status: Exit status, negative for a signal.
        oom_kills: Processes that the kernel killed in the cgroup meanwhile.
        output: Last lines of its stderr.
    """
    if -status == signal.SIGINT:
        return None
    kind = "failed" if status > 0 else "terminated" if -status == signal.SIGTERM else "died"
    detail: dict[str, wire.Scalar] = {"stage": STAGE}
    detail |= {"exit_status": status} if status > 0 else {"signal": signal_name(-status)}
    if oom_kills:
        detail["oom_kills"] = oom_kills
    if output and config.traceback:
        detail["output"] = output
    of = rank_of(environ) or _task_of(environ)
    run = early_run_name(environ, script)
    return batch_with_event(run, of, environ, pid=os.getppid(), kind=kind, detail=detail)


def how_it_ended(status: int) -> str:
    """Return `ended with exit status 1` or `was killed by SIGSEGV`."""
    return f"was killed by {signal_name(-status)}" if status < 0 else f"ended with exit status {status}"


def _task_of(environ: Mapping[str, str]) -> tuple[int, int]:
    """Number of the task, and of all tasks, where Slurm starts one `ddpobs run` on each host."""
    task, tasks = environ.get("SLURM_PROCID", ""), environ.get("SLURM_NTASKS", "")
    known = task.isdecimal() and tasks.isdecimal() and int(task) < int(tasks)
    return (int(task), int(tasks)) if known else (0, 1)
