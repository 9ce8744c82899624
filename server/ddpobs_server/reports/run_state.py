"""The state of a run and of a rank, from the times at which records last arrived.

A time in the future counts as long ago: it was recorded before the collector's clock was set back.
"""

from __future__ import annotations

from typing import Literal

from ddpobs_server.settings import Settings
from ddpobs_server.store import Run, Source

RunState = Literal["running", "finished", "stalled", "lost"]
RankState = Literal["running", "finished", "lost"]


def state_of_run(run: Run, settings: Settings, now_ns: int) -> RunState:
    """Return `finished` if all ranks sent a goodbye, `lost` without pulses, `stalled` without steps, else `running`."""
    if run.finished:
        return "finished"
    if _is_silent(run.last_seen_ns, settings.lost_after_s, now_ns):
        return "lost"
    return "stalled" if _is_silent(run.last_step_seen_ns, settings.stalled_after_s, now_ns) else "running"


def state_of_rank(source: Source, settings: Settings, now_ns: int) -> RankState:
    """Return `finished` if the rank sent a goodbye, `lost` without pulses, else `running`."""
    if source.goodbye:
        return "finished"
    return "lost" if _is_silent(source.last_seen_ns, settings.lost_after_s, now_ns) else "running"


def _is_silent(last_ns: int, limit_s: float, now_ns: int) -> bool:
    return abs(now_ns - last_ns) > limit_s * 1e9
