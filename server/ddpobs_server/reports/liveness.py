"""Which ranks of an attempt have ended, and how long each has been silent.

Silence counts until now, but no longer than a few seconds after the run's last batch. If no rank sends any more,
nothing shows whether the ranks still wait or were killed: the verdict of the last moments stays.
"""

from __future__ import annotations

from ddpobs.shared.silence import PULSE_SILENCE_NS
from ddpobs.wire.endings import IMPORTED
from ddpobs_server.store import Source

_AFTER_LAST_NS = 5 * 10**9
"""Longest time after a run's last batch that counts as silence: two flushes, and less than a rank's patience."""

_ENDS = {
    "failed": "failed",
    "died": "failed",
    "finished": "finished",
    "terminated": "finished",
    "interrupted": "interrupted",
    IMPORTED: "finished",
}


def world_size_of(sources: list[Source]) -> int:
    """Number of ranks of the attempt, 0 without a source."""
    return max((source.world_size for source in sources), default=0)


def silent_ns(sources: list[Source], now_ns: int) -> dict[int, int]:
    """Time since each rank's latest batch; for a rank without any batch, since the attempt's first one."""
    if not sources:
        return {}
    newest_ns = max(source.last_seen_ns for source in sources)
    is_over = all(source.ended for source in sources)
    now_ns = newest_ns if is_over else min(max(now_ns, newest_ns), newest_ns + _AFTER_LAST_NS)
    first_seen_ns = min(source.first_seen_ns for source in sources)
    silences = dict.fromkeys(range(world_size_of(sources)), now_ns - first_seen_ns)
    return silences | {source.rank: now_ns - source.last_seen_ns for source in sources}


def all_silent(sources: list[Source], now_ns: int) -> bool:
    """Whether some rank has not ended, and no rank sends any more. Clients before version 0.1 are not judged."""
    newest_ns = max((source.last_seen_ns for source in sources), default=now_ns)
    if not any(source.pulse is not None and source.pulse.patience_ns for source in sources):
        return False
    return abs(now_ns - newest_ns) > PULSE_SILENCE_NS and not all(source.ended for source in sources)


def ends(sources: list[Source]) -> dict[int, str]:
    """`failed`, `finished` or `interrupted` by rank that has ended.

    A terminated rank counts as finished while others run. If none runs, it counts as running: its end came from
    outside, and its last pulse shows whether the run hung before.
    """
    over = all(source.ended for source in sources)
    return {
        source.rank: _ENDS[source.ended]
        for source in sources
        if source.ended and not (over and source.ended == "terminated")
    }
