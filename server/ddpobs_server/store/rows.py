"""Rows that the store returns; columns of steps, spans and comms are `wire` types."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs import wire


@dataclass(frozen=True)
class Run:
    """A run, and the sums over the sources of its latest attempt. Times are this collector's wall clock, in ns.

    `run` is the key in the store: the name, after `WORKSPACE/` outside the default workspace.
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
        """Name of the run inside its workspace."""
        return self.run.rpartition("/")[2]

    @property
    def finished(self) -> bool:
        """Whether every source sent its goodbye."""
        return 0 < self.ranks <= self.goodbyes


@dataclass(frozen=True)
class Token:
    """A token as stored: the SHA-256 of its secret, its workspace and its scopes.

    From `revoked_ns` on it does not work. A time in the future is its expiry.
    """

    token_id: str
    digest: bytes
    name: str
    workspace: str
    scopes: tuple[str, ...]
    created_ns: int
    revoked_ns: int | None

    def works(self, now_ns: int) -> bool:
        """Whether the token is neither revoked nor expired."""
        return self.revoked_ns is None or now_ns < self.revoked_ns


@dataclass(frozen=True)
class Attempt:
    """A launch of a run; `ordinal` counts from 0 in the order of first arrival."""

    attempt: str
    ordinal: int
    first_seen_ns: int


@dataclass(frozen=True)
class Source:
    """A process of an attempt."""

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
    """Sums of a rank over an attempt, in ns; `own_ns` covers the `own_steps` with a known own time."""

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
    """Sums of a bucket over all ranks of an attempt, in ns."""

    module: int
    revision: int
    bucket: int
    steps: int
    compute_ns: int
    comm_ns: int
    exposed_ns: int


@dataclass(frozen=True)
class PeerTotal:
    """Straggler statistics of a rank, summed over an attempt."""

    rank: int
    steps: int
    delay_ns: int
    wait_ns: int
    straggler_steps: dict[str, int]


@dataclass(frozen=True)
class Aggregates:
    """Data for the metrics of some runs' latest attempts. Tuples in lists begin with the run.

    Attributes:
        runs: The runs.
        phases: Steps, communication and phases in the order of `phase_totals.NAMES`, by run and rank.
        last_seen: Rank, its last step, arrival time of that step, and records dropped.
        hellos: Hello of the lowest rank that sent a hello, by run.
        histograms: Steps under each of `schema.STEP_BOUNDS_S` and above the last, by run.
        buckets: Sums of each bucket.
        layouts: By module and revision.
        reduced_bytes: Rank, and bytes of the buckets that it reduced.
        peers: Straggler statistics of each rank.
        unused: Rank and the latest unused sets of each source and module, in the order in which the rank sent them.
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
