"""The ranks that started this process: a program that a rank starts is no rank of the rank's run.

It inherits the environment, and with it the run's name. Two signs show it: the environment lists the ranks above, and a
parent process has a place. The list also finds a rank that has ended, or whose child was given to another parent. The
places find a rank that began its training after it had started the child.

A job that a rank submits inherits the list too, and continues the run: the list counts within one job of one host.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path

from ddpobs.ranks.run_name import RANKS, parent_of
from ddpobs.recording.place.last_place import Slots
from ddpobs.recording.place.place_file import IDENTITY_AT, SUFFIX, Slot, identity_of, is_running, process_space

_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "JOB_ID")
"""Variables with the job's id, of Slurm, LSF, PBS and Grid Engine."""


def mark(environ: MutableMapping[str, str], slots: Slots, run: str) -> None:
    """Add this process to the ranks that its children see.

    Args:
        environ: The process's environment; changed on the training thread only, because other threads may read it.
        slots: The process's place.
        run: The run; before the ranks agree on it the name that the settings or the launcher give it, or empty.
    """
    own = f"{slots[Slot.PID]}:{slots[Slot.STARTED]}:{_job()}:"
    ranks = [rank for rank in environ.get(RANKS, "").split() if not rank.startswith(own)]
    environ[RANKS] = " ".join([*ranks, own + run])


def parent_ranks(folder: Path) -> dict[int, str]:
    """Return the ranks above this process: their runs by process number, the nearest first.

    Args:
        folder: Folder of the places. A run is empty if the rank has none there, and had none when it started this one.
    """
    runs, listed = dict(_identified(folder)), dict(_listed())
    above = [pid for pid in _parents() if pid in runs]
    return {pid: runs.get(pid) or listed.get(pid, "") for pid in [*above, *reversed(listed)]}


def _listed() -> Iterator[tuple[int, str]]:
    """Yield process number and run of each other process in the list."""
    for rank in os.environ.get(RANKS, "").split():
        with suppress(ValueError):
            pid, _, job, run = rank.split(":")
            if int(pid) != os.getpid() and job == _job():
                yield int(pid), run


def _job() -> str:
    """Return a short name of this job on this host."""
    text = " ".join([process_space(), *(os.environ.get(name, "") for name in _JOBS)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _parents() -> Iterator[int]:
    """Yield the numbers of the processes above this one, from its parent on."""
    pid: int | None = os.getpid()
    while pid and (pid := parent_of(pid)):
        yield pid


def _identified(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield process number and run of each rank of this host that has telemetry."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError, TypeError, LookupError):
            page = path.read_bytes()
            slots, identity = memoryview(page[:IDENTITY_AT]).cast("q"), identity_of(page)
            pid = slots[Slot.PID]
            if (
                identity
                and not identity.stage
                and identity.process_space == process_space()
                and is_running(pid, slots[Slot.STARTED])
            ):
                yield pid, identity.run
