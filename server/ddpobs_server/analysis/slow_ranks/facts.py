"""Figures of the finding `straggler`, as the API publishes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddpobs_server.analysis.finding import Facts


@dataclass(frozen=True)
class SlowRankFacts(Facts):
    """A slow rank, and why it is slow.

    Attributes:
        kind: `persistent` if the rank is late in at least 60 % of the steps of its intervals.
        host: The rank's host; None if it is not known.
        stages: Stages of the pipeline whose replicas were compared; None without a pipeline.
        since_step: Step since which the rank is slow; None if it was slow in all judged steps, or is no more.
        run_delay_left_out: Whether the delay is that without the training thread's time in the run queue.
        steps_used: Number of compared steps.
        late_share: Share of these steps in which the rank is late.
        lost_share: Share of these steps' time that the rank would cost if all other ranks were in time.
        lost_ns: Time lost to the rank.
        run_share: Share of all judged steps' time that is lost to the rank.
        chance: Probability of so many late steps by chance.
        excess_ns: Delay in the late steps: the median, of a stretch the mean.
        step_ns: Time of a step: the median, of a stretch the mean.
        phase_excess_ns: Delay by phase, of the phases that explain at least 80 % of it.
        own_ns: Median own time by rank; None for a stretch.
        module: Number of the module of the late bucket; None if no bucket is late.
        cause: `preempted`, `throttled`, `paging`, `collecting-garbage` or `own-work`; None if it is not known.
        reason: The cause in words, without figures.
        cause_unknown: Why the cause is not known; None if it is.
        cause_share: Share of the delay that the cause explains; None if no counter shows it.
        cause_ns: Delay by cause; None if the cause is not known.
        counter_excess: Excess of each counter over the other ranks' per late step; None if the cause is not known.
        blocked_ns: Excess of the time in which the thread neither ran nor was ready to run; None if it is not known.
        not_recorded: Counters that one side does not record.
        device: The device's clock and the other ranks', if that is the cause; None if it is not.
        thread: The Python thread that runs while the training thread waits, if that is the cause; None if it is not.
    """

    kind: Literal["persistent", "intermittent"]
    host: str | None
    stages: list[int] | None
    since_step: int | None
    run_delay_left_out: bool
    steps_used: int
    late_share: float
    lost_share: float
    lost_ns: int
    run_share: float
    chance: float
    excess_ns: int
    step_ns: int
    phase_excess_ns: dict[str, int]
    own_ns: dict[str, int] | None
    module: int | None
    cause: str | None
    reason: str
    cause_unknown: str | None
    cause_share: float | None
    cause_ns: dict[str, int] | None
    counter_excess: dict[str, float] | None
    blocked_ns: int | None
    not_recorded: list[str]
    device: str | None
    thread: str | None


@dataclass(frozen=True)
class MovingFacts(Facts):
    """A slowness that moves from rank to rank.

    Attributes:
        kind: `moving`.
        stretches: Number of stretches in which one rank is slow.
        stretch_steps: Their median length in steps.
        shares: Share of the loss by rank, the largest first.
        lost_ns: Time lost to all of them.
        lost_share: Share of these steps' time that is lost.
        run_share: Share of all judged steps' time that is lost.
        steps_used: Number of compared steps.
        stages: Stages of the pipeline whose replicas were compared; None without a pipeline.
    """

    stretches: int
    stretch_steps: int
    shares: dict[str, float]
    lost_ns: int
    lost_share: float
    run_share: float
    steps_used: int
    stages: list[int] | None = None
    kind: Literal["moving"] = "moving"


@dataclass(frozen=True)
class RankTurn:
    """A rank that is slow in its turns.

    Attributes:
        rank: Number of the rank.
        phase: Phase in which it is slow.
        late_share: Share of the steps in which it is late.
        excess_ns: Median delay in these steps.
        share: Its share of the loss.
        lost_ns: Time lost to it.
        chance: Probability of so many late steps by chance.
    """

    rank: int
    phase: str
    late_share: float
    excess_ns: int
    share: float
    lost_ns: int
    chance: float


@dataclass(frozen=True)
class TakingTurnsFacts(Facts):
    """Ranks that are slow in turn, each in its own phase or in its own steps.

    Attributes:
        kind: `taking turns`.
        turns: The ranks with their phases.
        lost_ns: Time lost to all of them.
        lost_share: Share of these steps' time that is lost.
        run_share: Share of all judged steps' time that is lost.
        steps_used: Number of compared steps.
        stages: Stages of the pipeline whose replicas were compared; None without a pipeline.
    """

    turns: list[RankTurn]
    lost_ns: int
    lost_share: float
    run_share: float
    steps_used: int
    stages: list[int] | None = None
    kind: Literal["taking turns"] = "taking turns"
