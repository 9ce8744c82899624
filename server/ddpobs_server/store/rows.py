"""What the store gives back, apart from columns."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs import wire


@dataclass(frozen=True)
class Run:
    """A run, and the sums over the sources of its latest attempt. Times are this collector's wall clock, in ns.

    `run` is the key under which the store has it.
    """

    run: str
    attempt: str
    created_ns: int
    last_seen_ns: int
    commits: int
    world_size: int
    ranks: int
    steps: int
    emitted: int
    dropped: int
    last_step_seen_ns: int
    goodbyes: int

    @property
    def name(self) -> str:
        """What its own workspace calls it."""
        return self.run.rpartition("/")[2]


@dataclass(frozen=True)
class Token:
    """What is kept of a token: its secret's SHA-256, and what may be done with it where."""

    token_id: str
    digest: bytes
    name: str
    workspace: str
    scopes: tuple[str, ...]
    created_ns: int
    revoked_ns: int | None


@dataclass(frozen=True)
class Attempt:
    """One launch of a run; `ordinal` counts from 0 in the order in which they were first seen."""

    attempt: str
    ordinal: int
    first_seen_ns: int


@dataclass(frozen=True)
class Source:
    """One process of one attempt. `missing_batches` counts gaps in the sequence numbers seen so far."""

    source: str
    attempt: str
    rank: int
    world_size: int
    emitted: int
    dropped: int
    last_seen_ns: int
    last_step_seen_ns: int
    last_step: int
    anchor: wire.Anchor
    hello: wire.Hello | None
    pulse: wire.Pulse | None
    goodbye: bool
    missing_batches: int


@dataclass(frozen=True)
class Rollup:
    """Sums of one rank over an attempt, in ns; `own_ns` over the `own_steps` that have it."""

    rank: int
    steps: int
    wall_ns: int
    phases_ns: dict[str, int]
    comm_ns: int
    samples: int
    own_ns: int
    own_steps: int


@dataclass(frozen=True)
class BucketRollup:
    """Sums of one bucket over all ranks of an attempt, in ns."""

    rank: int
    module: int
    revision: int
    bucket: int
    steps: int
    compute_ns: int
    comm_ns: int
    exposed_ns: int


@dataclass(frozen=True)
class PeerTotal:
    """Straggler statistics of one rank, summed over an attempt."""

    rank: int
    steps: int
    delay_ns: int
    wait_ns: int
    straggler_steps: dict[str, int]
