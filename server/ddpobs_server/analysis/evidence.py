"""The input and the output of every finding function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ddpobs import wire
from ddpobs.shared.words import format_ranks
from ddpobs.wire.facts import NotReducedFacts, facts_of
from ddpobs_server.analysis.account.rank_account import Process
from ddpobs_server.analysis.account.run_account import RunAccount
from ddpobs_server.analysis.finding import Finding, NotJudged, first_names
from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins
from ddpobs_server.analysis.slow_ranks.work import WorkFit, fit_work
from ddpobs_server.analysis.steps.intervals import StepClock
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps, index_ranks, join
from ddpobs_server.analysis.steps.phase_shares import phase_shares
from ddpobs_server.analysis.steps.pipeline import EVENT, Stage, stages_of
from ddpobs_server.analysis.steps.rank_groups import RankGroup, groups_of

MIN_STEPS = 20
"""Minimum number of steps that most findings are judged by."""
MAX_LISTED = 50
"""Maximum number of parameter names that a finding lists."""

Judgement = Sequence[Finding | NotJudged]
"""Result of a finding function: its findings, and its questions that could not be judged."""


class ColumnsTooLargeError(Exception):
    """The requested columns have more rows than one read may return."""


class ColumnReader(Protocol):
    """Reads further columns of the attempt, which are too large to read for every diagnosis.

    Each method may raise `ColumnsTooLargeError`. A finding function handles the error: it returns `NotJudged`.
    """

    def layouts(self) -> list[wire.Layout]:
        """Return the bucket layouts of all modules and revisions."""

    def spans(self, ranks: list[int], first: int, last: int) -> tuple[wire.Ints, wire.Spans]:
        """Return the bucket spans of the steps in [first, last], and the rank of each row."""

    def lateness(self, rank: int, first: int, last: int) -> LatenessBins | None:
        """Return a rank's lateness in the steps in [first, last], in bins as fine as can be read quickly.

        A bin has one step if columns are read, and the bins have further ranks then. None without any bin.
        """

    def comms(self, rank: int, first: int, last: int) -> wire.Comms:
        """Return the other communication of a rank in the steps in [first, last]."""

    def readiness(self, ranks: list[int], first: int, last: int) -> list[tuple[int, wire.Readiness]]:
        """Return the latest sampled readiness of parameters in the steps in [first, last], with its rank."""


class _PartColumns:
    """Further columns for a part of the ranks. Lateness in bins compares all ranks of the world, and is left out."""

    def __init__(self, columns: ColumnReader) -> None:
        self._columns = columns
        self.layouts, self.spans = columns.layouts, columns.spans
        self.comms, self.readiness = columns.comms, columns.readiness

    def lateness(self, rank: int, first: int, last: int) -> LatenessBins | None:
        return None


@dataclass(frozen=True)
class Evidence:
    """The facts of one attempt that a finding may use.

    Attributes:
        rank: Rank of each row of `steps`.
        steps: The latest steps of all ranks.
        joined: The steps in which all ranks can be compared.
        unused: (rank, unused set) in the order in which each rank recorded them; of each rank and module at least the
            latest `LATEST_SETS`.
        unused_left_out: Number of unused sets whose names were too large to read.
        settings: The reducer's settings.
        emitted: Emitted records by rank.
        dropped: Dropped records by rank.
        missing_batches: Missing batches by rank, for ranks that ended in order.
        sent_batches: Batches that these ranks sent, in total.
        events: (rank, event), the first of each source and kind.
        earlier_ends: (rank, event) of the ends in each earlier attempt, the oldest first; empty unless a rank failed.
        ahead_ns: How far each rank's wall clock is ahead of the collector's.
        hosts: Host name by rank.
        absences: Ranks of the world that are not in `joined`, by reason; the reason has `{}` for the ranks.
        separate_groups_reason: The reason if the ranks do not wait for each other, else empty.
        has_gaps: Whether a batch is missing before a later one of the same rank. Only looked up if
            `find_unused_parameters` is on.
        columns: Reads further columns; None if there are none.
        world_size: Number of ranks.
        pulses: Latest heartbeat by rank; `Pulse.at_ns` is on that rank's monotonic clock.
        stuck_pulses: Last pulse by rank in which it was stuck; a rank may have gone on since.
        silent_ns: Time since each rank's last batch, on the collector's clock.
        last_batch_ns: Arrival of each rank's last batch, Unix time on the collector's clock; no entry without a batch.
        is_lost: Whether the ranks sent pulses, and none sends any more, without a failure or an interrupt.
        ended: How each rank ended: `finished`, `interrupted`, `failed`, or empty while it runs.
        fingerprints: (rank, fingerprint) of the sampled steps.
        account: Account of the run's wall time; for an earlier attempt, of that attempt alone.
        processes: Processes of the attempt, with their accounts.
        shared: Results that several findings use; filled by the first that needs them.
        hellos: Identity and settings by rank.
        now_ns: The collector's wall clock when the evidence was read; None if it is not known. Diagnoses are cached
            until the run's next commit, so a finding that depends on the time needs a cache version that expires.
        whole: All steps that are judged, in which all ranks can be compared; None if they are `joined`.
        earlier: Rollups of the steps before `whole`, of a run too long to read; None if there are none.
        clock: When steps began and ended.
    """

    rank: wire.Ints
    steps: wire.Steps
    joined: JoinedSteps
    unused: list[tuple[int, wire.Unused]] = field(default_factory=list)
    unused_left_out: int = 0
    settings: dict[str, wire.Scalar] = field(default_factory=dict)
    emitted: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    missing_batches: dict[int, int] = field(default_factory=dict)
    sent_batches: int = 0
    events: list[tuple[int, wire.Event]] = field(default_factory=list)
    earlier_ends: list[list[tuple[int, wire.Event]]] = field(default_factory=list)
    ahead_ns: dict[int, int] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    absences: dict[str, list[int]] = field(default_factory=dict)
    separate_groups_reason: str = ""
    has_gaps: bool = False
    columns: ColumnReader | None = None
    world_size: int = 0
    pulses: dict[int, wire.Pulse] = field(default_factory=dict)
    stuck_pulses: dict[int, wire.Pulse] = field(default_factory=dict)
    silent_ns: dict[int, int] = field(default_factory=dict)
    last_batch_ns: dict[int, int] = field(default_factory=dict)
    is_lost: bool = False
    ended: dict[int, str] = field(default_factory=dict)
    fingerprints: list[tuple[int, wire.Fingerprint]] = field(default_factory=list)
    account: RunAccount | None = None
    processes: Sequence[Process] = ()
    hellos: dict[int, wire.Hello] = field(default_factory=dict)
    now_ns: int | None = None
    whole: JoinedSteps | None = None
    earlier: LatenessBins | None = None
    clock: StepClock = field(default_factory=StepClock)
    shared: dict[str, Any] = field(default_factory=dict, init=False, compare=False)

    @property
    def step_range(self) -> tuple[int, int]:
        """First and last step of `steps`."""
        return (int(self.steps.step.min()), int(self.steps.step.max())) if len(self.steps.step) else (0, 0)

    @cached_property
    def step_count(self) -> int:
        """Number of distinct steps in `steps`."""
        return len(np.unique(self.steps.step))

    @property
    def is_sharded(self) -> bool:
        """Whether units of a fully sharded model, or DeepSpeed's collectives, take the place of DDP's buckets."""
        return self.is_fully_shard or self.settings.get("reducer") == "deepspeed"

    @property
    def is_fully_shard(self) -> bool:
        """Whether the model is one of FSDP2, whose units the script chooses."""
        return self.settings.get("reducer") == "fully_shard"

    @cached_property
    def absent_ranks(self) -> list[int]:
        """Ranks of the world that are not in `joined`, in rising order."""
        return sorted(rank for ranks in self.absences.values() for rank in ranks)

    @property
    def absence_reasons(self) -> list[str]:
        """A sentence for each reason of `absences` that applies."""
        return [reason.format(format_ranks(ranks)) for reason, ranks in self.absences.items() if ranks]

    def where(self, ranks: Sequence[int], *places: str) -> str:
        """The hosts of these ranks, and further places, in words: `host node1, bucket 0.2: head.weight`.

        A single rank is named with its process: `host node1, pid 4711`.
        """
        hosts = sorted({self.hosts[rank] for rank in ranks if rank in self.hosts})
        shown = [f"host{'s' * (len(hosts) > 1)} {first_names(hosts)}"] if hosts else []
        if len(ranks) == 1 and (hello := self.hellos.get(ranks[0])):
            shown.append(f"pid {hello.pid}")
        return ", ".join([*shown, *filter(None, places)])

    @property
    def averages_apart(self) -> bool:
        """Whether the script averages the replicas after several optimizer steps, whose own times are one figure."""
        facts = (facts_of(event, NotReducedFacts) for _, event in self.events if event.kind == "exchanged")
        return any(each.every > 1 for each in facts)

    @cached_property
    def stages(self) -> list[Stage]:
        """Stages of the run's pipeline; empty without one."""
        return stages_of(self.events)

    @cached_property
    def groups(self) -> list[RankGroup]:
        """Process groups that reduce gradients apart from each other; empty if all ranks reduce them together."""
        return groups_of(self.hellos, self.world_size) if self.separate_groups_reason else []

    def of_part(self, part: Stage | RankGroup) -> Evidence:
        """Return the evidence of one stage's replicas, or of one process group, which wait for each other.

        The rollups of earlier steps compare all ranks of the world, and are left out.
        """
        rows = np.isin(self.rank, part.ranks)
        return replace(
            self,
            rank=self.rank[rows],
            steps=self.steps.select(rows),
            joined=join(self.rank[rows], self.steps.select(rows)),
            whole=None if self.whole is None else self.whole.of_ranks(part.ranks),
            earlier=None,
            absences={
                reason: [rank for rank in ranks if rank in part.ranks] for reason, ranks in self.absences.items()
            },
            separate_groups_reason="",
            columns=None if self.columns is None else _PartColumns(self.columns),
            events=[(rank, event) for rank, event in self.events if event.kind != EVENT],
        )

    @cached_property
    def phase_shares(self) -> Floats:
        """Share of each phase in each rank's steps, shape [ranks, phases]; see `phase_shares`."""
        return phase_shares(self.rank, self.steps)

    @cached_property
    def work_fit(self) -> WorkFit | None:
        """Own time over the work of a step, in the steps of `joined`; None if it does not follow work."""
        return fit_work(self.joined, self.steps)

    @cached_property
    def last_steps(self) -> dict[int, int]:
        """Last step of each rank, by the rank's own numbers."""
        ranks, index = index_ranks(self.rank)
        last = np.full(len(ranks), wire.UNKNOWN, np.int64)
        np.maximum.at(last, index, self.steps.step)
        return dict(zip(ranks.tolist(), last.tolist(), strict=True))
