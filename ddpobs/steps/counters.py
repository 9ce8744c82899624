"""Counters of the kernel and of the garbage collector, as read at the end of a synchronised backward.

A reading keeps the kernel's text. It is parsed here, on the telemetry thread.
"""

from __future__ import annotations

from ddpobs.wire import UNKNOWN

COUNTERS = (
    "running_ns",
    "run_delay_ns",
    "preemptions",
    "major_faults",
    "throttled_ns",
    "collections",
    "collecting_ns",
)
"""Columns of `wire.Steps` that are differences of two readings."""
SELDOM_READ = slice(3, 5)
"""Places of the totals that not every reading has, in the result of `totals`."""
NO_USAGE = (UNKNOWN, UNKNOWN)
NOT_READ = (UNKNOWN,) * (1 + len(COUNTERS))


Reading = tuple[int, bytes, int, int, bytes | None, int, int]
"""Totals at one moment; those of the kernel are of the training thread.

1. The series: readings of one series count from the same zero.
2. Content of the thread's `schedstat`; empty if it cannot be read.
3. Involuntary switches; `UNKNOWN` if not read this time.
4. Page faults that read a disk; `UNKNOWN` as well.
5. Content of `cpu.stat` of the control group with the quota. Empty if it cannot be read, None without a quota.
6. Garbage collections of the process.
7. Their length in nanoseconds.

It is flat, since the garbage collector visits each object of a waiting step.
"""


def totals(reading: Reading | tuple[()] | None) -> tuple[int, ...]:
    """Return the series and the totals in the order of `COUNTERS`; `UNKNOWN` where a counter was not read."""
    if not reading:
        return NOT_READ
    series, schedule, preemptions, major_faults, quota, collections, collecting_ns = reading
    return (
        series,
        *_schedule(schedule),
        preemptions,
        major_faults,
        0 if quota is None else throttled_ns(quota),
        collections,
        collecting_ns,
    )


def throttled_ns(statistics: bytes) -> int:
    """Parse the time for which a quota held a control group up; `UNKNOWN` if it is absent.

    Args:
        statistics: Content of `cpu.stat`, of either version: microseconds in the second, nanoseconds in the first.
    """
    for name, unit_ns in ((b"throttled_usec", 1000), (b"throttled_time", 1)):
        _, separator, value = statistics.partition(name + b" ")
        if separator:
            digits = value.split(None, 1)[0]
            return int(digits) * unit_ns if digits.isdigit() else UNKNOWN
    return UNKNOWN


def _schedule(text: bytes) -> tuple[int, int]:
    """Parse time on a processor and time in the run queue, in ns (Documentation/scheduler/sched-stats.rst).

    A kernel without these statistics reports zeros.
    """
    fields = text.split()
    if len(fields) < 2 or not (fields[0].isdigit() and fields[1].isdigit()) or fields[0] == b"0":
        return UNKNOWN, UNKNOWN
    return int(fields[0]), int(fields[1])
