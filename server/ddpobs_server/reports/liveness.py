"""Which ranks of an attempt have ended, and how long each has been silent.

While the run sends, silence counts until now. Once all ranks have ended or are silent, it counts until the last batch:
a run that hung until it was killed keeps the verdict of its last moments.
"""

from __future__ import annotations

from ddpobs_server.settings import Settings
from ddpobs_server.store import Source

_ENDS = {"failed": "failed", "died": "failed", "finished": "finished", "terminated": "finished"}


def world_size_of(sources: list[Source]) -> int:
    """Number of ranks of the attempt, 0 without a source."""
    return max((source.world_size for source in sources), default=0)


def silent_ns(sources: list[Source], now_ns: int, settings: Settings) -> dict[int, int]:
    """Time since each rank's latest batch; for a rank without any batch, since the attempt's first one."""
    if not sources:
        return {}
    newest_ns = max(source.last_seen_ns for source in sources)
    if all(source.ended for source in sources) or abs(now_ns - newest_ns) > settings.lost_after_s * 1e9:
        now_ns = newest_ns
    first_seen_ns = min(source.first_seen_ns for source in sources)
    silences = dict.fromkeys(range(world_size_of(sources)), now_ns - first_seen_ns)
    return silences | {source.rank: now_ns - source.last_seen_ns for source in sources}


def ends(sources: list[Source]) -> dict[int, str]:
    """`failed` or `finished` by rank that has ended.

    A terminated rank counts as finished while others run. If none runs, it counts as running: its end came from
    outside, and its last pulse shows whether the run hung before.
    """
    over = all(source.ended for source in sources)
    return {
        source.rank: _ENDS[source.ended]
        for source in sources
        if source.ended and not (over and source.ended == "terminated")
    }
