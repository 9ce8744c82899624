"""The batch with one event of a rank or a command that has no telemetry."""

from __future__ import annotations

import platform
import secrets
import socket
import time
from collections.abc import Mapping

import ddpobs
from ddpobs import wire
from ddpobs.recording.place.early_place import early_attempt


def batch_with_event(
    run: str,
    rank_and_size: tuple[int, int],
    environ: Mapping[str, str],
    *,
    pid: int,
    kind: str,
    detail: Mapping[str, wire.Scalar],
) -> wire.Batch:
    """Return a batch with one event that happens now.

    Args:
        run: Name of the run.
        rank_and_size: Rank, and number of ranks.
        environ: The environment, with the launch.
        pid: Process that the event is about, or that started it.
        kind: Kind of the event.
        detail: Its facts by name; the time of day is added.
    """
    anchor = wire.Anchor(wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())
    rank, world_size = rank_and_size
    return wire.Batch(
        version=wire.VERSION,
        run=run,
        attempt=early_attempt(run, environ),
        source=secrets.token_hex(8),
        seq=0,
        rank=rank,
        world_size=world_size,
        emitted=1,
        dropped=0,
        anchor=anchor,
        hello=wire.Hello(
            host=socket.gethostname(),
            pid=pid,
            device="",
            backend="",
            versions={"ddpobs": ddpobs.__version__, "python": platform.python_version()},
        ),
        events=[wire.Event(kind=kind, at_ns=anchor.monotonic_ns, detail={**detail, "wall_ns": anchor.wall_ns})],
    )
