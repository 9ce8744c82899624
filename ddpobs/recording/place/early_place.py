"""The place of a rank under `ddpobs run` until it has telemetry: it reports the rank if a signal ends it before.

It has the format of a place (`place_file.py`), is written once, and its run and attempt are those that `early_failure`
gives an error. It uses the standard library alone, because it is written before the rank's script begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ddpobs.ranks.run_name import run_name, start_ticks
from ddpobs.recording.place.place_file import (
    IDENTITY_AT,
    LAUNCH,
    MAGIC,
    PHASES,
    PLACES,
    SIZE,
    SUFFIX,
    PlaceIdentity,
    Slot,
    joined_file,
    process_space,
)
from ddpobs.recording.probes import oom_kills

PATH = "DDPOBS_EARLY_PLACE"
"""Variable with the file's path, for a program that the rank's process starts and that trains in its stead."""
START = "start"
"""Stage of a rank that has no telemetry yet."""
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_LAUNCHERS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
"""Variables that the ranks of one attempt share, and of which one differs in the next."""
_LOOPBACK = ("", "localhost", "127.0.0.1", "::1")
"""Addresses of a launch on one host, whose ranks mostly share a `ddpobs run`."""


def rank_of(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return rank and number of ranks as torchrun, Open MPI or MPICH gives them to a process; None for no rank.

    Slurm sets MPICH's variables too, for a task that may be a launcher.
    """
    for rank, size in _RANK_VARIABLES[: 2 if "SLURM_JOB_ID" in environ else None]:
        if environ.get(rank, "").isdecimal() and environ.get(size, "").isdecimal():
            return int(environ[rank]), int(environ[size])
    return None


def early_run_name(environ: Mapping[str, str], script: str = "") -> str:
    """Return the run of a rank that has agreed on none with the others; equal on all ranks of this host."""
    return environ.get("DDPOBS_RUN", "").strip() or run_name(environ, environ.get(LAUNCH, ""), script)


def early_attempt(run: str, environ: Mapping[str, str]) -> str:
    """Return the attempt of such a rank: a hash of what the ranks of one launch share."""
    # Slurm's job step has a `ddpobs run` on each host, or for each rank.
    is_shared = environ.get("MASTER_ADDR", "") in _LOOPBACK and "SLURM_STEP_ID" not in environ
    launch = environ.get(LAUNCH, "") if is_shared else ""
    shared = " ".join([run, launch, *(environ.get(name, "") for name in _LAUNCHERS)])
    return hashlib.sha256(shared.encode()).hexdigest()[:16]


def leave(environ: MutableMapping[str, str]) -> None:
    """Write the place of this process, a rank by its environment, and put its path there."""
    rank, folder, launch = rank_of(environ), environ.get(PLACES), environ.get(LAUNCH)
    if rank is None or not folder or not launch:
        return
    run, memory_events = early_run_name(environ), oom_kills.path()
    identity = PlaceIdentity(
        run=run,
        attempt=early_attempt(run, environ),
        source=secrets.token_hex(8),
        rank=rank[0],
        world_size=rank[1],
        host=socket.gethostname(),
        process_space=process_space(),
        memory_events=str(memory_events or ""),
        launch=launch,
        stage=START,
    )
    kills = oom_kills.count(memory_events)
    text = json.dumps(asdict(identity)).encode()
    page = bytearray(SIZE)
    slots = memoryview(page)[:IDENTITY_AT].cast("q")
    slots[Slot.PID], slots[Slot.STARTED] = os.getpid(), start_ticks(os.getpid()) or 0
    slots[Slot.WALL_NS], slots[Slot.MONOTONIC_NS] = time.time_ns(), time.monotonic_ns()
    slots[Slot.AT_NS] = slots[Slot.ALIVE_NS] = slots[Slot.MONOTONIC_NS]
    slots[Slot.PHASE] = PHASES - 1
    slots[Slot.MODULE] = slots[Slot.BUCKET] = -1
    slots[Slot.OOM_KILLS] = -1 if kills is None else kills
    slots[Slot.MAGIC] = MAGIC
    end = IDENTITY_AT + 8 + len(text)
    if end > SIZE:
        return
    page[IDENTITY_AT:end] = len(text).to_bytes(8, "little") + text
    places = Path(folder)
    with suppress(OSError):
        places.mkdir(mode=0o700, parents=True, exist_ok=True)
        if places.lstat().st_uid != os.getuid():  # In a folder that is open to all, another user may have made it.
            return
        path = places / f"{identity.source}{SUFFIX}"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(page)
        environ[PATH] = str(path)


def end_in_order(environ: Mapping[str, str]) -> None:
    """Note that this process runs its exit handlers; a parent may still note an exit status that is an error's."""
    with suppress(OSError), Path(environ.get(PATH, "")).open("r+b") as file:
        file.seek(8 * Slot.ORDERLY)
        file.write(struct.pack("=q", 1))


def remove(environ: Mapping[str, str]) -> None:
    """Remove the place: the rank has telemetry, or its error is reported, or it trains without telemetry."""
    if path := environ.get(PATH):
        with suppress(OSError):
            Path(path).unlink(missing_ok=True)


def note_joined(environ: Mapping[str, str]) -> None:
    """Note for `ddpobs run` that a rank has reported itself, and remove its place."""
    remove(environ)
    folder, launch = environ.get(PLACES), environ.get(LAUNCH)
    if folder and launch:
        with suppress(OSError):
            joined_file(Path(folder), launch).touch(mode=0o600)
