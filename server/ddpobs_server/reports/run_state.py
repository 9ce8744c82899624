"""The state of a run and of a rank, from their ends, their latest pulses and the times at which records last arrived.

A time in the future counts as long ago: it was recorded before the collector's clock was set back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddpobs.wire.endings import IMPORTED
from ddpobs.wire.states import RankState, RunState
from ddpobs_server.settings import Settings
from ddpobs_server.store import Run, RunVersion, Source

_FRESH_NS = 2 * 10**9
"""Age at which a diagnosis without a new commit is computed again."""

LAST_SCRAPES_NS = 60 * 10**9
"""Time for which `/metrics` shows a run that is over, so that its last values are scraped."""
_RECENT_NS = 30 * 10**9
"""Age up to which a diagnosis of a live run is used for marks in a picture."""


def state_of_run(run: Run, settings: Settings, now_ns: int) -> RunState:
    """Return the first state that applies.

    | state | condition |
    |---|---|
    | `interrupted` | a rank was interrupted, and none failed or died before |
    | `failed` | a rank failed or died, or all ranks have ended and some were terminated |
    | `finished` | all ranks sent a goodbye, or were imported and are not stuck |
    | `lost` | no pulse arrives |
    | `hung` | a rank is stuck, also in imported dumps, and no rank goes on |
    | `stalled` | no step arrives |
    | `running` | else |
    """
    if run.interrupted:
        return "interrupted"
    if run.has_failed:
        return "failed"
    if run.is_over and not run.hangs:
        return "finished"
    if not run.is_over and _is_silent(run.last_seen_ns, settings.lost_after_s, now_ns):
        return "lost"
    if run.hangs:
        return "hung"
    return "stalled" if _is_silent(run.last_step_seen_ns, settings.stalled_after_s, now_ns) else "running"


def is_lost(sources: Sequence[Source], settings: Settings, now_ns: int) -> bool:
    """Return whether this is the state `lost` of an attempt whose ranks have sent pulses."""
    if not any(source.pulse for source in sources) or all(source.ended for source in sources):
        return False
    if any(source.ended in ("failed", "died", "interrupted") for source in sources):
        return False
    return _is_silent(max(source.last_seen_ns for source in sources), settings.lost_after_s, now_ns)


def state_of_rank(source: Source, settings: Settings, now_ns: int) -> RankState:
    """Return the first state that applies: as it ended, `lost` without pulses, `hung` if stuck, `running`.

    Imported dumps do not show an end: their ranks have the state at the time of the dump.
    """
    if source.ended in ("finished", "interrupted"):
        return "finished" if source.ended == "finished" else "interrupted"
    if source.ended == IMPORTED and source.goodbye:
        return "finished"
    if source.ended not in ("", IMPORTED):
        return "failed"
    if not source.ended and _is_silent(source.last_seen_ns, settings.lost_after_s, now_ns):
        return "lost"
    return "hung" if source.stuck_ns else "running"


class ReportVersion(NamedTuple):
    """The version of a response about a run; `clock` counts fresh periods of a live run, or says how it ended."""

    created_ns: int
    commits: int
    clock: str


def report_version(version: RunVersion, settings: Settings, now_ns: int) -> ReportVersion:
    """Return a version that changes with each commit, and with time too while the run is neither over nor lost.

    Time alone makes a hang: a diagnosis of a run that has just stopped sending must not stay "all well".
    """
    if version.is_over:
        clock = "over"
    elif _is_silent(version.last_seen_ns, settings.lost_after_s, now_ns):
        clock = "lost"
    else:
        clock = str(now_ns // _FRESH_NS)
    return ReportVersion(version.created_ns, version.commits, clock)


def is_recent(version: ReportVersion, now: ReportVersion) -> bool:
    """Return whether a version is of the last half minute of a run that is live."""
    if version.created_ns != now.created_ns or not (version.clock.isdecimal() and now.clock.isdecimal()):
        return False
    return 0 <= int(now.clock) - int(version.clock) <= _RECENT_NS // _FRESH_NS


def _is_silent(last_ns: int, limit_s: float, now_ns: int) -> bool:
    return abs(now_ns - last_ns) > limit_s * 1e9
