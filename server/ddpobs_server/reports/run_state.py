"""Whether a run goes on, and a rank.

What was seen in the future was seen before this machine's clock was set back.
"""

from __future__ import annotations

from typing import Literal

from ddpobs_server.settings import Settings
from ddpobs_server.store import Run, Source

RunState = Literal["running", "finished", "stalled", "lost"]
RankState = Literal["running", "finished", "lost"]


def state_of_run(run: Run, settings: Settings, now_ns: int) -> RunState:
    """Finished: all said goodbye. Lost: no pulses. Stalled: pulses, no steps. Else running."""
    if run.finished:
        return "finished"
    if _silent(run.last_seen_ns, settings.lost_after_s, now_ns):
        return "lost"
    return "stalled" if _silent(run.last_step_seen_ns, settings.stalled_after_s, now_ns) else "running"


def state_of_rank(source: Source, settings: Settings, now_ns: int) -> RankState:
    """Finished: it said goodbye. Lost: no pulses. Else running."""
    if source.goodbye:
        return "finished"
    return "lost" if _silent(source.last_seen_ns, settings.lost_after_s, now_ns) else "running"


def _silent(last_ns: int, for_s: float, now_ns: int) -> bool:
    return abs(now_ns - last_ns) > for_s * 1e9
