"""A rank's pulse: the training thread's activity, the machine's state, and the use of loaders."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from ddpobs.wire.fields import MAX_INDEX, UNKNOWN, Count, CountOrUnknown, Index, Name, Nanoseconds, Record

Activity = Literal["", "data", "bucket", "collective", "checkpoint", "compile", "evaluation", "code"]
"""What a training thread does; empty where it was not determined."""


Stack = Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=40)]
"""Python frames of a thread, outermost first, such as `train.py:57 step`."""
RANK_TEXT = re.compile(r"[0-9]{1,7}")
"""A rank as a key of `Pulse.processes`."""


class Machine(Record, frozen=True, kw_only=True):
    """State of a rank's host and device, at a pulse; a figure that the system does not report is `UNKNOWN`.

    Shares are parts of a thousand since the previous pulse.

    Attributes:
        processors: Number of processors that this process may use.
        allowed: Processors that the training thread may use, as ranges such as `0-3,8`; empty if not reported.
        host_processors: Number of the host's processors.
        process_permille: Processor time of this process; 1,000 is one processor.
        busy_permille: Part of the host's processor time that was in use.
        steal_permille: Part of the host's processor time that its hypervisor gave to other guests.
        load_milli: Thousand times the host's load average over one minute.
        quota_permille: The control group's processor quota; 1,000 is one processor, `UNKNOWN` without a quota.
        throttled_ns: Time in which the quota held the process up, since it started.
        threads: Python threads beside the training thread that take most of a processor, with their parts since the
            start of telemetry.
        memory_bytes: The host's memory.
        available_bytes: Memory that programs can still take.
        resident_bytes: Memory of this process.
        device_busy_permille: Part of the device's time in which a kernel ran.
        device_clock_mhz: Clock of the device's processors.
        device_most_clock_mhz: Highest clock of the device's processors.
        device_memory_bytes: The device's memory.
        device_used_bytes: Memory of the device that is in use.
        device_slowdowns: Reasons for which the device lowers its clock, such as `hw_thermal`.
    """

    processors: CountOrUnknown = UNKNOWN
    allowed: Name = ""
    host_processors: CountOrUnknown = UNKNOWN
    process_permille: CountOrUnknown = UNKNOWN
    busy_permille: CountOrUnknown = UNKNOWN
    steal_permille: CountOrUnknown = UNKNOWN
    load_milli: CountOrUnknown = UNKNOWN
    quota_permille: CountOrUnknown = UNKNOWN
    throttled_ns: CountOrUnknown = UNKNOWN
    threads: Annotated[dict[Name, Count], msgspec.Meta(max_length=8)] = msgspec.field(default_factory=dict)
    memory_bytes: CountOrUnknown = UNKNOWN
    available_bytes: CountOrUnknown = UNKNOWN
    resident_bytes: CountOrUnknown = UNKNOWN
    device_busy_permille: CountOrUnknown = UNKNOWN
    device_clock_mhz: CountOrUnknown = UNKNOWN
    device_most_clock_mhz: CountOrUnknown = UNKNOWN
    device_memory_bytes: CountOrUnknown = UNKNOWN
    device_used_bytes: CountOrUnknown = UNKNOWN
    device_slowdowns: Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=16)] = (
        msgspec.field(default_factory=list)
    )


class CodePlace(Record, frozen=True, kw_only=True):
    """A place in the code at which looks found the training thread, inside of a step.

    Attributes:
        phase: Phase that the place's time counts as.
        place: Innermost lines of the user's code, such as `train.py:57 → metrics.py:31 accuracy`; empty where texts are
            not sent.
        calls: Name of the function that the innermost line calls, such as `to`; empty where there is none.
        iterates: Whether a training loop waits there for the next value of an iterator that is not torch's.
        looks: Number of looks that found the place.
        time_ns: Time for which these looks stand; 0 from older clients.
    """

    phase: Literal["data", "other"]
    place: Name = ""
    calls: Name = ""
    iterates: bool = False
    looks: Count
    time_ns: Count = 0


class Input(Record, frozen=True, kw_only=True):
    """Torch's loaders as training used them lately. Counts are halved every 2,048 batches, so that the past fades.

    Attributes:
        iterators: Number of iterators that training began over a loader.
        creating_ns: Time in the creation of iterators.
        batches: Number of batches that training took.
        fetching_ns: Time until the batches came.
        first_ns: Part of `fetching_ns` until the first batch of each iterator came: its workers start meanwhile.
        closing_ns: Time in ending the workers of iterators that were dropped.
        collating_ns: Time in `collate_fn`, with zero workers.
        workers: Number of worker processes of the loader in use; `UNKNOWN` before the first batch.
        persistent: Its workers outlive an iterator.
        ahead: Number of batches that a worker prepares in advance (`prefetch_factor`).
        cpus: Number of processors that this process may use.
        awaited_ns: Time by the worker whose batch was awaited.
        alone_ns: Part of `awaited_ns` in which most of the other workers' batches had already come.
    """

    iterators: Count = 0
    creating_ns: Count = 0
    batches: Count = 0
    fetching_ns: Count = 0
    first_ns: Count = 0
    closing_ns: Count = 0
    collating_ns: Count = 0
    workers: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=MAX_INDEX)] = UNKNOWN
    persistent: bool = False
    ahead: Count = 0
    cpus: Count = 0
    awaited_ns: Annotated[list[Count], msgspec.Meta(max_length=256)] = msgspec.field(default_factory=list)
    alone_ns: Annotated[list[Count], msgspec.Meta(max_length=256)] = msgspec.field(default_factory=list)


class Pulse(Record, frozen=True, kw_only=True):
    """Activity of the training thread at the telemetry thread's latest look. It remains readable when a rank hangs.

    Attributes:
        at_ns: Time of the look.
        phase: Phase of the open step.
        step: Number of the open step.
        module: Number of the module of `bucket`; `UNKNOWN` before the first launch.
        bucket: Index of the bucket that was launched last, or that the rank waits for; `UNKNOWN` before the first
            launch.
        idle_ns: Time since the rank's last progress, which is an event or a new line of Python outside of a wait.
        patience_ns: Time without progress after which the rank counts as stuck.
        activity: `bucket` and `collective` are waits for the other ranks; empty where it was not determined.
        waits_in: Name of the collective, such as `all_reduce` or `barrier`, where the activity is `collective`.
        other_waits: Waits of other threads for collectives, such as `all_reduce of the default group in thread
            writer`; none from older clients.
        synchronised: Number of synchronised backward passes that this rank has begun; `UNKNOWN` from older clients.
        collectives: Number of collectives that user code has started; `UNKNOWN` from older clients.
        buffer_broadcasts: Number of broadcasts of DDP modules' buffers that this rank has begun; `UNKNOWN` from older
            clients.
        place: Innermost lines of the user's code, such as `train.py:57 → dataset.py:31 __getitem__`.
        stack: The training thread's Python frames, outermost first; sent while the rank is stuck.
        threads: The same of other threads in the user's code, by name; none from older clients.
        processes: State (`stopped`, `gone`) of processes of this host that are neither running nor sleeping, by rank.
        machine: State of the host and the device; None from older clients.
        looks: Number of latest looks at the training thread inside of steps.
        effective_looks: Number of looks of equal weight that would be as exact; 0 from older clients.
        code: Most frequent places of these looks, in the phases `data` and `other`.
        input: Use of torch's loaders; None before the first batch.
    """

    at_ns: Nanoseconds
    phase: Literal["data", "forward", "backward", "exposed_comm", "optimizer", "other"]
    step: Count
    module: Index = UNKNOWN
    bucket: Index = UNKNOWN
    idle_ns: Count = 0
    patience_ns: Count = 0
    activity: Activity = ""
    waits_in: Name = ""
    synchronised: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**48)] = UNKNOWN
    collectives: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**48)] = UNKNOWN
    buffer_broadcasts: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**48)] = UNKNOWN
    place: Name = ""
    stack: Stack = msgspec.field(default_factory=list)
    processes: Annotated[dict[Name, Name], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    machine: Machine | None = None
    looks: Count = 0
    effective_looks: Count = 0
    code: Annotated[list[CodePlace], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=list)
    input: Input | None = None
    threads: Annotated[dict[Name, Stack], msgspec.Meta(max_length=8)] = msgspec.field(default_factory=dict)
    other_waits: Annotated[list[Name], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=list)

    @property
    def process_states(self) -> dict[int, str]:
        """`processes` by the number of the rank."""
        return {int(rank): state for rank, state in self.processes.items() if RANK_TEXT.fullmatch(rank)}
