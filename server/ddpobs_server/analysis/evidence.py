"""The input of every finding: one attempt's columns and facts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.joined_steps import Joined, ranks_of

MIN_STEPS = 20


_SHOWN = 50


@dataclass(frozen=True)
class Evidence:
    """Everything a finding may rest on.

    Attributes:
        rank: Of each row of `steps`.
        steps: The steps looked at, all ranks.
        joined: Those in which all ranks can be compared.
        unused: (rank, unused set) as told: the last of those that name parameters, if any, and `LATEST_SETS`.
        settings: The reducer's settings.
        emitted: Records emitted, by rank.
        dropped: Records dropped, by rank.
        missing_batches: How many have not arrived of ranks that said goodbye, by rank.
        sent_batches: By those ranks together.
        events: (rank, event) as told.
        ahead_ns: How far each rank's wall clock is ahead of the collector's.
        absent: Ranks of the world that are not among the joined ones.
        apart: Why the ranks do not wait for each other, empty where they do.
        gaps: Whether a batch of any rank is missing before another; looked at with `find_unused_parameters` only.
    """

    rank: wire.Ints
    steps: wire.Steps
    joined: Joined
    unused: list[tuple[int, wire.Unused]]
    settings: dict[str, wire.Scalar]
    emitted: dict[int, int]
    dropped: dict[int, int]
    missing_batches: dict[int, int]
    sent_batches: int
    events: list[tuple[int, wire.Event]] = field(default_factory=list)
    ahead_ns: dict[int, int] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    apart: str = ""
    gaps: bool = False

    @property
    def seen(self) -> tuple[int, int]:
        """First and last step looked at."""
        return (int(self.steps.step.min()), int(self.steps.step.max())) if len(self.steps.step) else (0, 0)

    @cached_property
    def last_steps(self) -> dict[int, int]:
        """Each rank's last step, by its own numbers."""
        ranks, place = ranks_of(self.rank)
        last = np.full(len(ranks), wire.UNKNOWN, np.int64)
        np.maximum.at(last, place, self.steps.step)
        return dict(zip(ranks.tolist(), last.tolist(), strict=True))


Judgement = list[Finding] | NotJudged
