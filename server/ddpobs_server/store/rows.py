"""Rows that the store returns; columns of steps, spans and comms are `wire` types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ddpobs import wire


@dataclass(frozen=True)
class RunVersion:
    """State of a run's data, by which its reports and its metrics are cached.

    Attributes:
        created_ns: Creation of the run.
        commits: Batches stored since.
        last_seen_ns: Arrival of its latest batch.
        is_over: Whether every source of the latest attempt has ended.
    """

    created_ns: int
    commits: int
    last_seen_ns: int
    is_over: bool


@dataclass(frozen=True)
class Run:
    """A run, and the sums over the sources of its latest attempt. Times are this collector's wall clock, in ns.

    `run` is the key in the store: the name, after `WORKSPACE/` outside the default workspace. The last counts are of
    sources: that ended in any way, that failed or died, that were terminated, that were interrupted before any failed,
    that were imported; of these and of those that run, the stuck ones; and those that are neither stuck nor silent.
    `tags` and `note` are None until a person sets them.
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
    ended: int = 0
    failed: int = 0
    terminated: int = 0
    interrupted: int = 0
    imported: int = 0
    stuck: int = 0
    moving: int = 0
    tags: tuple[str, ...] | None = None
    note: str | None = None

    @property
    def name(self) -> str:
        """Name of the run inside its workspace."""
        return self.run.rpartition("/")[2]

    @property
    def version(self) -> RunVersion:
        """Version of its reports."""
        return RunVersion(self.created_ns, self.commits, self.last_seen_ns, is_over=self.is_over)

    @property
    def is_over(self) -> bool:
        """Whether every source has ended."""
        return 0 < self.ranks <= self.ended

    @property
    def has_finished(self) -> bool:
        """Whether every source has ended in order: a later attempt is another training, and no restart."""
        return self.is_over and not (self.failed or self.terminated or self.interrupted)

    @property
    def has_failed(self) -> bool:
        """Whether a source failed or died, or all have ended and some were terminated; an interrupt is no failure."""
        return self.interrupted == 0 and (self.failed > 0 or (self.is_over and self.terminated > 0))

    @property
    def hangs(self) -> bool:
        """Whether a source is stuck, and no source goes on."""
        return self.stuck > 0 and self.moving == 0


@dataclass(frozen=True)
class WantedRuns:
    """Conditions for the runs of a list.

    Attributes:
        search: Words. The name, the host, the note or a `#tag` must contain each of them, in any case of its letters.
        seen_after_ns: Only runs with a batch after this time; 0 for all.
        created_after_ns: Only runs whose first batch came after this time; 0 for all.
    """

    search: str = ""
    seen_after_ns: int = 0
    created_after_ns: int = 0


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


CallerKind = Literal["person", "token", "settings-token", "anonymous", "command", "signal"]
"""How a caller is known: signed on by a proxy, by a token of the database or of the settings, not at all, as a user of
the collector's machine, or not, because a signal names nobody."""
AuditAction = Literal["run.delete", "run.labels", "token.create", "token.revoke", "workspace.limits", "settings.reload"]


@dataclass(frozen=True)
class AuditEntry:
    """A change, and who made it.

    Attributes:
        action: Kind of the change.
        subject: Name of the run or of the workspace, or id of the token.
        workspace: Workspace of the subject.
        kind: How the caller is known.
        identity: The person, owner of the token, or user of the machine; empty if it is not known.
        token_id: Id of the caller's token; empty for none.
        peer: Address of the client, or name of the machine.
        detail: New values, as JSON.
        at_ns: The collector's wall clock, Unix time in ns.
        entry_id: Unique; entries sort by it in the order of `at_ns`. Empty until the entry is stored.
    """

    action: AuditAction
    subject: str
    workspace: str
    kind: CallerKind
    identity: str
    token_id: str
    peer: str
    detail: dict[str, Any]
    at_ns: int
    entry_id: str = ""


@dataclass(frozen=True)
class WorkspaceUsage:
    """Stored runs of a workspace, and the bytes of their chunks, layouts, unused sets, events and bucket sums."""

    runs: int
    size_bytes: int


@dataclass(frozen=True)
class Attempt:
    """A launch of a run; `ordinal` counts from 0 in the order of first arrival.

    Attributes:
        attempt: Id of the attempt: 16 hexadecimal digits.
        ordinal: Number of the attempt, from 0.
        first_seen_ns: Arrival of the attempt's first batch, as Unix time, in nanoseconds.
    """

    attempt: str
    ordinal: int
    first_seen_ns: int


@dataclass(frozen=True)
class AttemptSummary(Attempt):
    """An attempt, and the sums over its sources, as in `Run`."""

    last_seen_ns: int
    world_size: int
    ranks: int
    steps: int
    ended: int
    failed: int
    terminated: int
    interrupted: int

    @property
    def is_over(self) -> bool:
        """Whether every source has ended."""
        return 0 < self.ranks <= self.ended

    @property
    def has_finished(self) -> bool:
        """Whether every source has ended in order: a later attempt is another training, and no restart."""
        return self.is_over and not (self.failed or self.terminated or self.interrupted)


@dataclass(frozen=True)
class AttemptTimes:
    """Times of an attempt, as Unix time in ns.

    Attributes:
        first_seen_ns: Arrival of its first batch.
        last_seen_ns: Arrival of its latest batch.
        began_ns: Start of the process of its lowest rank, on that rank's clock; None if no rank has reported it.
        latest_ns: Latest time at which a rank made a batch, on its own clock, but no later than its arrival; of
            imported files their last time.
        imported: Whether it is of imported files.
    """

    first_seen_ns: int
    last_seen_ns: int
    began_ns: int | None
    latest_ns: int
    imported: bool = False


@dataclass(frozen=True)
class Source:
    """A process of an attempt.

    `ended` is an end of `ddpobs.wire.endings`, or empty while the process runs. `stuck_ns` is its time without
    progress at its latest pulse, 0 if that is no longer than its patience. `stuck_pulse` is its latest pulse with such
    a time, which stays after the process went on or ended. `moving_ns_a_step` is its rank's mean exposed communication
    without waiting, in ns of a compared step; None from clients that do not measure it.
    """

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
    ended: str
    stuck_ns: int
    first_seen_ns: int
    account: wire.Account | None = None
    stuck_pulse: wire.Pulse | None = None
    moving_ns_a_step: float | None = None


@dataclass(frozen=True)
class HostTotal:
    """What an attempt of a run took on one host.

    Attributes:
        attempt: Id of the attempt.
        host: Name of the host; empty for ranks whose host is not known.
        commits: Batches of the run that were stored when the total was made.
        began_ns: Arrival of the attempt's first batch, as Unix time, in ns.
        wall_ns: Wall time of the attempt, with the time since the end of the attempt before it.
        ranks: Number of its ranks on the host.
        has_rank_zero: Whether rank 0 is one of them.
        torch: Version of torch; empty if it is not known.
        tags: Tags of the run.
        parts: Rank time in ns by part of the account; the parts add up to `wall_ns` times `ranks`.
        excess_ratio: Own time of the host's slowest rank over that of the other hosts, as a share of the step; None if
            the hosts were not compared.
    """

    attempt: str
    host: str
    commits: int
    began_ns: int
    wall_ns: int
    ranks: int
    has_rank_zero: bool
    torch: str
    tags: tuple[str, ...]
    parts: dict[str, float]
    excess_ratio: float | None


class HostTotals(NamedTuple):
    """Columns of `HostTotal`, and the key of each total's run; the totals of a run follow each other."""

    run: Sequence[str]
    attempt: Sequence[str]
    host: Sequence[str]
    began_ns: Sequence[int]
    wall_ns: Sequence[int]
    torch: Sequence[str]
    tags: Sequence[tuple[str, ...]]
    parts: Sequence[dict[str, float]]


class ComparedHost(NamedTuple):
    """The key of a run, and the columns of a `HostTotal` that compare a host with the others of its attempt."""

    run: str
    attempt: str
    host: str
    ranks: int
    has_rank_zero: int
    excess_ratio: float | None
