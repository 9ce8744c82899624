"""Reports about processes that died: a batch with their place, sent together with the batches that they spooled.

`ddpobs run`, a surviving rank, the next attempt or `ddpobs push` recovers the places in a spool's folder. If two of
them do so at once, they write the same batch, and the collector stores it once. A survivor leaves what `ddpobs run`
watches: its launcher may kill it before it has sent the report.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

import zstandard

from ddpobs import wire
from ddpobs.export.spool import Encoded, Spool
from ddpobs.recording.place.dead_places import Place, places_of_the_dead
from ddpobs.recording.place.last_place import FOLDER

_POLL_S = 0.02


def recover(
    folder: Path, limit_bytes: int, run: str | None = None, parent_s: float = 0.0, launch: str = ""
) -> set[str]:
    """Turn the places of dead processes into spooled batches.

    Args:
        folder: The spool's folder.
        limit_bytes: Limit of the spool's size.
        run: The run of the processes; None for all runs.
        parent_s: Longest wait until the parent of the dead processes has noted how they ended.
        launch: A `ddpobs run` that reports the processes that it watches; empty for none.

    Returns:
        The sources of those processes.
    """
    spool, sources = Spool(folder, limit_bytes), set()
    for last_place in _places(folder, run, launch, time.monotonic() + parent_s):
        with suppress(OSError):
            spool.put(encoded(last_place), last_place.at_wall_ns, lambda *_: None)
            sources.add(last_place.identity.source)
            last_place.remove()
    return sources


def _places(folder: Path, run: str | None, launch: str, until: float) -> list[Place]:
    """Return the places of the run's dead processes, after their parent has noted all exits or the time has passed."""
    while True:
        places = [
            place
            for place in places_of_the_dead(folder / FOLDER)
            if run in (None, place.identity.run) and not (place.watched and place.identity.launch == launch)
        ]
        if all(place.exit_status is not None for place in places) or time.monotonic() >= until:
            return places
        time.sleep(_POLL_S)


def died_batch(last_place: Place, output: str = "") -> wire.Batch:
    """Build the batch that reports a death. It depends on the place alone, so that a repetition is equal.

    Its sequence number follows the last batch that the process built.

    Args:
        last_place: The place.
        output: Last lines of the command's stderr, which only its `ddpobs run` has.
    """
    identity = last_place.identity
    at_ns = last_place.at_monotonic_ns if last_place.interrupted_ns is None else last_place.interrupted_ns
    kind = "died" if last_place.interrupted_ns is None else "interrupted"
    if identity.stage and last_place.exit_status == -signal.SIGTERM:  # A rank with telemetry reports it itself.
        kind = "terminated"
    detail = _detail(last_place, at_ns) | ({"output": output} if output else {})
    event = wire.Event(kind=kind, at_ns=at_ns, step=max(0, last_place.step), detail=detail)
    return wire.Batch(
        version=wire.VERSION,
        run=identity.run,
        attempt=identity.attempt,
        source=identity.source,
        seq=last_place.next_seq,
        rank=identity.rank,
        world_size=identity.world_size,
        emitted=last_place.emitted + 1,
        dropped=last_place.dropped,
        anchor=wire.Anchor(wall_ns=last_place.at_wall_ns, monotonic_ns=last_place.at_monotonic_ns),
        hello=_hello(last_place) if identity.stage else None,
        events=[event],
    )


def encoded(last_place: Place, output: str = "") -> Encoded:
    """Return the batch that reports a death, as it is sent."""
    batch = died_batch(last_place, output)
    body = zstandard.compress(wire.encode(batch), 1)
    return Encoded(batch.run, batch.source, batch.seq, 1, body)


def _hello(last_place: Place) -> wire.Hello:
    """The rank had no telemetry, which would have sent one."""
    return wire.Hello(host=last_place.identity.host, pid=last_place.pid, device="", backend="", versions={})


def _detail(last_place: Place, event_ns: int) -> dict[str, wire.Scalar]:
    detail: dict[str, wire.Scalar] = {
        "wall_ns": last_place.at_wall_ns - last_place.at_monotonic_ns + event_ns,
        "phase": last_place.phase,
        "module": last_place.module,
        "bucket": last_place.bucket,
        "step": last_place.step,
        "synchronised": last_place.synchronised,
    }
    if last_place.identity.stage:
        detail["stage"] = last_place.identity.stage
    if last_place.oom_kills is not None:
        detail["oom_kills"] = last_place.oom_kills
    status = last_place.exit_status
    if status is not None and status < 0:
        detail["signal"] = signal_name(-status)
    elif status is not None:
        detail["exit_status"] = status
    return detail


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:  # A real-time signal.
        return f"signal {number}"
