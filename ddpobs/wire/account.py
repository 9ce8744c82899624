"""A process's account of its wall time."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ddpobs.wire.fields import UNKNOWN, Count, Name, Nanoseconds, Record, Total

PositiveRatio = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
WARM_UP_STEPS = 10
"""Steps at the start of a process in which torch.compile is at work in an ordinary run: for its first sizes, a second
one, accumulation and the first evaluation."""


class OutsideInterval(msgspec.Struct, frozen=True, array_like=True):
    """Steps and times between which `total_ns` were spent outside of steps, in one go or in several."""

    first_step: Count
    last_step: Count
    began_ns: Nanoseconds
    ended_ns: Nanoseconds
    total_ns: Total


class TelemetryCost(Record, frozen=True, kw_only=True):
    """Step time with telemetry over step time while it rests, on the run itself.

    Attributes:
        ratio: Relative time of a step; 1.01 is one percent more.
        low: Lower bound of its 95 % interval.
        high: Upper bound.
        pairs: Number of rests that it is measured by.
    """

    ratio: PositiveRatio
    low: PositiveRatio
    high: PositiveRatio
    pairs: Count


class Outside(Record, frozen=True, kw_only=True):
    """Time outside of steps of one kind, since the source began.

    Attributes:
        kind: Kind of the time.
        total_ns: Sum of the time.
        count: Number of times that it occurred.
        intervals: At most 32 intervals, near ones merged: first and last step, begin and end on the rank's monotonic
            clock, and time outside of steps.
    """

    kind: Literal["evaluation", "checkpoint", "after_checkpoint", "waiting", "resting"]
    total_ns: Total
    count: Count
    intervals: Annotated[list[OutsideInterval], msgspec.Meta(max_length=32)] = msgspec.field(default_factory=list)


class Account(Record, frozen=True, kw_only=True):
    """Where the process's wall time went until `until_ns`; the latest account of a source replaces earlier ones.

    The time from `first_step_ns` to `last_step_ns` is the steps' phases, the time outside of steps of each kind,
    `between_ns` and `unrecorded_ns`.

    Attributes:
        started_ns: Start of the process; None if it is not known.
        imported_ns: End of ddpobs's and torch's import.
        ready_ns: Completion of the first DDP module.
        first_step_ns: Start of the first step; None before it has ended.
        last_step_ns: End of the last step; None before it.
        until_ns: End of the account.
        steps: Number of steps that ended.
        phases_ns: Time of these steps in each phase, in the order of `PHASES`.
        prepare_ns: Time from `ready_ns` to the first step that nothing explains.
        model_wait_ns: Waits for other ranks before `ready_ns`, as far as they were seen.
        prepare_wait_ns: Part of `prepare_ns` that is waits for other ranks.
        start_wait_place: Call and place in the code of the longest of these waits; empty without one.
        first_batch_ns: Time of the first step's data phase, which `phases_ns` contains.
        compile_ns: Time of these steps in torch.compile, which `phases_ns` contains.
        compile_phases_ns: The same by phase; empty from older clients.
        recompile_ns: Part of it in steps from number `WARM_UP_STEPS` on.
        recompile_place: Function that was compiled anew last in them; empty if it is not known.
        recompile_reason: Its guard that failed, as torch words it; empty if it is not known.
        outside: Time outside of steps, also before the first and after the last step.
        between_ns: Time between steps that nothing explains.
        unrecorded_ns: Time between steps with dropped steps in between.
        open_step_ns: Time of the step under way.
        finished: Whether training has ended: later time is neither step nor between steps.
        telemetry: Cost of telemetry, by steps in which it rested; None if it does not rest, or too seldom so far.
        checkpoint_step: Number of steps that had ended when the latest checkpoint was saved; `UNKNOWN` without a
            checkpoint.
    """

    started_ns: Nanoseconds | None = None
    imported_ns: Nanoseconds
    ready_ns: Nanoseconds
    first_step_ns: Nanoseconds | None = None
    last_step_ns: Nanoseconds | None = None
    until_ns: Nanoseconds
    steps: Count = 0
    phases_ns: Annotated[list[Total], msgspec.Meta(min_length=6, max_length=6)]
    prepare_ns: Total = 0
    model_wait_ns: Total = 0
    prepare_wait_ns: Total = 0
    start_wait_place: Name = ""
    first_batch_ns: Total = 0
    compile_ns: Total = 0
    compile_phases_ns: Annotated[list[Total], msgspec.Meta(max_length=6)] = msgspec.field(default_factory=list)
    recompile_ns: Total = 0
    recompile_place: Name = ""
    recompile_reason: Name = ""
    outside: Annotated[list[Outside], msgspec.Meta(max_length=8)] = msgspec.field(default_factory=list)
    between_ns: Total = 0
    unrecorded_ns: Total = 0
    open_step_ns: Total = 0
    finished: bool = False
    telemetry: TelemetryCost | None = None
    checkpoint_step: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**48)] = UNKNOWN
