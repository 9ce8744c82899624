"""Quantities in words: durations, times of day, rank time, sizes and counts. Whatever prints them, prints them alike.

`page/static/times.js` has the same forms for the page.
"""

from __future__ import annotations

from datetime import UTC, datetime

_MIN_LARGE = 999.5
"""A number from here on has no digit after the point in three digits."""
_SECONDS_UNTIL_S, _MINUTES_UNTIL_MIN, _HOURS_UNTIL_H = 120, 120, 48
_SECONDS_UNTIL_MIN = 0.01
"""Rank-minutes below which a rank time is in seconds."""


def duration(ns: float) -> str:
    """A duration with three digits, or with its two largest units: `30 ms`, `1.25 s`, `2 min 5 s`, `3 h 20 min`."""
    for limit, unit, size in ((_MIN_LARGE, "ns", 1.0), (_MIN_LARGE * 1e3, "µs", 1e3), (_MIN_LARGE * 1e6, "ms", 1e6)):
        if abs(ns) < limit:
            return f"{three_digits(ns / size)} {unit}" if ns else "0 s"
    seconds = round(ns / 1e9)
    if seconds < _SECONDS_UNTIL_S:
        return f"{three_digits(ns / 1e9)} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < _MINUTES_UNTIL_MIN:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    if hours < _HOURS_UNTIL_H:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def rank_time(ns: float) -> str:
    """Time of ranks, summed: `0.73 rank-minutes`, `3.4 rank-hours`. One rank over one hour has one rank-hour."""
    minutes = ns / 60e9
    if minutes < _SECONDS_UNTIL_MIN:
        return f"{ns / 1e9:.2g} rank-seconds"
    if minutes < _MINUTES_UNTIL_MIN:
        return f"{minutes:.2g} rank-minutes" if minutes < 1 else f"{three_digits(minutes)} rank-minutes"
    return f"{three_digits(minutes / 60)} rank-hours"


def three_digits(value: float) -> str:
    """A number with at most three digits, or all digits before the point."""
    return f"{value:.3g}" if abs(value) < _MIN_LARGE else f"{value:,.0f}"


def counted(count: int, noun: str) -> str:
    """A number with its noun: `1 step`, `2,000 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def steps_text(first: int, last: int) -> str:
    """The steps from the first to the last: `step 7`, `steps 0 to 1,499`."""
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def size_text(size_bytes: float) -> str:
    """A size in decimal units: `25 MB`."""
    for limit, unit, size in ((1e3, "B", 1.0), (1e6, "kB", 1e3), (1e9, "MB", 1e6)):
        if size_bytes < limit:
            return f"{three_digits(size_bytes / size)} {unit}"
    return f"{three_digits(size_bytes / 1e9)} GB"


def time_of_day(ns: int) -> str:
    """A time in UTC, with its date: `2026-11-28 23:10:53 UTC`."""
    try:
        return f"{datetime.fromtimestamp(ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):  # A client's clock may be absurd.
        return "unknown time"


def time_range(began_ns: int, ended_ns: int, *, is_dated: bool = False) -> str:
    """Two times and the time between: `23:10:53–23:11:45 UTC (52 s)`; with their dates if these differ.

    A moment has its date, and with `is_dated` the first time of a day too.
    """
    took = f"({duration(max(0, ended_ns - began_ns))})"
    try:
        began, ended = (datetime.fromtimestamp(ns / 1e9, UTC) for ns in (began_ns, ended_ns))
    except (OverflowError, ValueError, OSError):
        return took
    if began_ns == ended_ns:
        return time_of_day(began_ns)
    if began.date() != ended.date():
        return f"{began:%Y-%m-%d %H:%M:%S} – {ended:%Y-%m-%d %H:%M:%S} UTC {took}"
    date = f"{began:%Y-%m-%d} " if is_dated else ""
    return f"{date}{began:%H:%M:%S}–{ended:%H:%M:%S} UTC {took}"
