"""Slow ranks as facts. Detectors find them; extent, bucket and cause complete them; `describe.py` makes the text."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpobs_server.analysis.finding import Gain, Interval, Severity
from ddpobs_server.analysis.slow_ranks.facts import MovingFacts, TakingTurnsFacts

_PERSISTENT_SHARE = 0.6
"""Share of the steps in which a rank is late, from which it is slow all the time and not now and then."""


@dataclass(frozen=True)
class LateBucket:
    """The bucket in which a slow backward falls behind, or the unit, in words, and its first parameters."""

    module: int
    index: int
    parameters: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class DeviceClock:
    """The clock of a rank's device, of the other ranks' devices, and why the device lowered it."""

    mhz: int
    usual_mhz: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class BusyThread:
    """A Python thread beside the training thread, and the share of the time in which it ran."""

    name: str
    running_share: float


@dataclass(frozen=True)
class Cause:
    """Why a rank is slow, as its counters show it.

    Attributes:
        name: The cause; None if it is not known.
        missing_counter: The counter without which no cause is known; empty if the late steps are no longer examined.
        share: Its share of the delay; None if no counter shows it.
        parts_ns: The delay by cause.
        counter_excess: Excess of each counter over the other ranks', per late step.
        blocked_ns: Excess of the time in which the training thread neither ran nor was ready to run.
        not_recorded: Counters that are not recorded.
        device: The lowered clock, if it is the cause.
        thread: The thread that runs while the training thread waits, if it is the cause.
    """

    name: str | None = None
    missing_counter: str = ""
    share: float | None = None
    parts_ns: dict[str, float] = field(default_factory=dict)
    counter_excess: dict[str, float] = field(default_factory=dict)
    blocked_ns: float = 0.0
    not_recorded: tuple[str, ...] = ()
    device: DeviceClock | None = None
    thread: BusyThread | None = None


@dataclass(frozen=True)
class SlowRank:
    """A rank that is, or was, slow in one phase.

    Attributes:
        rank: The rank.
        phase: The phase with most of its excess.
        steps: First and last step that were judged.
        steps_used: Number of compared steps.
        late_share: Share of these steps in which the rank is late.
        lost_share: The rank's excess in its late steps, as a share of the time of these steps.
        chance: p-value of its lateness.
        excess_ns: Excess over the other ranks' median in its late steps: the median, of a stretch the mean.
        step_ns: Time of a step: the median, of a stretch the mean.
        phase_excess_ns: The phases that explain most of the excess, the largest first.
        severity: How much it matters.
        since_step: Where a slowness that goes on began; None if it began with the judged steps.
        is_over: Whether the latest steps are free of it.
        without_queue: The delay is that without the training thread's time in the run queue.
        own_ns: Median own time by rank; empty for a stretch.
        gain: Saving if the rank were as fast as the others; None if it is over.
        intervals: Steps of the whole run in which the rank was slow.
        lost_ns: Time lost to it in these steps.
        run_share: Share of the run's time that is lost to it.
        bucket: Where backward falls behind; None if it is not known.
        cause: Why the rank is slow.
    """

    rank: int
    phase: str
    steps: tuple[int, int]
    steps_used: int
    late_share: float
    lost_share: float
    chance: float
    excess_ns: int
    step_ns: int
    phase_excess_ns: dict[str, int]
    severity: Severity
    since_step: int | None = None
    is_over: bool = False
    without_queue: bool = False
    own_ns: dict[str, int] = field(default_factory=dict)
    gain: Gain | None = None
    intervals: tuple[Interval, ...] = ()
    lost_ns: float = 0.0
    run_share: float = 0.0
    bucket: LateBucket | None = None
    cause: Cause = field(default_factory=Cause)

    @property
    def is_persistent(self) -> bool:
        """Whether the rank is late in most of its steps."""
        return self.late_share >= _PERSISTENT_SHARE


@dataclass(frozen=True)
class SlowInTurn:
    """Several ranks that are slow in turn.

    Attributes:
        facts: Shares of the ranks, or their turns, and the time that they lose.
        ranks: The ranks, in rising order.
        phase: The phase with most of the loss.
        steps: First and last step that were judged.
        intervals: The same steps with their times.
        severity: How much it matters.
        is_over: Whether the latest steps are free of it.
        gain: Saving if no rank were slow; None if it is over.
    """

    facts: MovingFacts | TakingTurnsFacts
    ranks: list[int]
    phase: str
    steps: tuple[int, int]
    intervals: tuple[Interval, ...]
    severity: Severity
    is_over: bool
    gain: Gain | None
