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

    @property
    def finished(self) -> bool:
        """Whether every source said goodbye."""
        return 0 < self.ranks <= self.goodbyes


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
    """One process of one attempt."""

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

    module: int
    revision: int
    bucket: int
    steps: int
    compute_ns: int
    comm_ns: int
    exposed_ns: int


@dataclass(frozen=True)
class Aggregates:
    """What metrics tell of some runs' latest attempts, each list with the run first.

    Attributes:
        runs: The runs.
        phases: By run and rank: steps, communication and phases, as `totals.NAMES` has them.
        last_seen: Rank, its last step, when that was seen, and records dropped, of each rank.
        hellos: What the lowest rank said, by run.
        histograms: Steps under each of `schema.STEP_BOUNDS_S` and above the last, by run.
        buckets: Sums of each bucket.
        layouts: By module and revision.
        reduced_bytes: Rank, and bytes of buckets reduced.
        peers: Straggler statistics of each rank.
        unused: Rank and the latest unused sets of each source and module, in the order in which each rank told them.
    """

    runs: list[Run]
    phases: dict[str, dict[int, tuple[int, ...]]]
    last_seen: list[tuple[str, int, int, int, int]]
    hellos: dict[str, wire.Hello]
    histograms: dict[str, list[int]]
    buckets: list[tuple[str, BucketRollup]]
    layouts: list[tuple[str, wire.Layout]]
    reduced_bytes: list[tuple[str, int, int]]
    peers: list[tuple[str, PeerTotal]]
    unused: list[tuple[str, int, wire.Unused]]


@dataclass(frozen=True)
class PeerTotal:
    """Straggler statistics of one rank, summed over an attempt."""

    rank: int
    steps: int
    delay_ns: int
    wait_ns: int
    straggler_steps: dict[str, int]
