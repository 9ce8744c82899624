"""Identity of a process's batches: run, attempt, source, rank and sequence number."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs import wire


@dataclass(frozen=True)
class Identity:
    """The part of a batch's envelope that stays the same for all batches of a process."""

    run: str
    attempt: str
    source: str
    rank: int
    world_size: int


@dataclass(frozen=True)
class Envelope(Identity):
    """All of a batch but its records."""

    seq: int
    emitted: int
    dropped: int
    anchor: wire.Anchor
