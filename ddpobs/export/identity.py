"""The identity of a process's batches: run, attempt, source, rank and sequence number."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs import wire


@dataclass(frozen=True)
class Identity:
    """Whose batches these are."""

    run: str
    attempt: str
    source: str
    rank: int
    world_size: int


@dataclass(frozen=True)
class Envelope(Identity):
    """What a batch carries besides its records."""

    seq: int
    emitted: int
    dropped: int
    anchor: wire.Anchor
