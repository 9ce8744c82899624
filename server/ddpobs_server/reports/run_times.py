"""When attempts and runs began and ended, as the list, the page, the report and the terminal show it.

The ranks' own clocks count: a batch that waited in a spool arrives long after its time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ddpobs_server.store import AttemptTimes

_EARLIEST_NS = 10**18
"""An earlier time, before September 2001, is that of a clock which does not show the time of day."""


class Span(NamedTuple):
    """A begin and an end, as Unix time in ns; `is_dated` is false for files without a time of day."""

    began_ns: int
    latest_ns: int
    is_dated: bool = True


def span_of_attempt(times: AttemptTimes) -> Span:
    """Begin of an attempt, and its latest time; the arrivals of its batches if no rank has reported its start."""
    is_known = times.began_ns is not None and times.began_ns >= _EARLIEST_NS
    if times.imported:
        return Span(times.latest_ns if times.began_ns is None else times.began_ns, times.latest_ns, is_known)
    if times.began_ns is None or not is_known:
        return Span(times.first_seen_ns, times.last_seen_ns)
    began_ns = min(times.began_ns, times.first_seen_ns)
    return Span(began_ns, max(began_ns, times.latest_ns))


def span_of_run(attempts: Collection[AttemptTimes]) -> Span | None:
    """Begin of a run's first attempt, and the latest time of all; None without attempts."""
    spans = [span_of_attempt(times) for times in attempts]
    if not spans:
        return None
    began_ns, latest_ns, are_dated = zip(*spans, strict=True)
    return Span(min(began_ns), max(latest_ns), all(are_dated))
