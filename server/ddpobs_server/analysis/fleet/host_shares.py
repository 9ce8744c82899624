"""What an attempt took on each of its hosts, and by how much each host was late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddpobs.shared.delay import excesses
from ddpobs.wire import printable
from ddpobs_server.analysis.account.parts import Parts, added
from ddpobs_server.analysis.account.run_account import AttemptAccount
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps

MIN_STEPS = 32
"""Minimum number of compared steps."""
MAX_HOSTS = 4096
"""Maximum number of hosts of an attempt; the others, with the fewest ranks, count as not known."""
_MAX_NS = 2**62
"""Clients' clocks may be absurd, and the database has 64 bits."""
_UNKNOWN = "unknown"
"""Host of imported files that name none."""
_NAME_CHARACTERS = 255
"""Longest name of a host (RFC 1035, section 2.3.4)."""


@dataclass(frozen=True)
class HostShare:
    """Ranks of an attempt on one host.

    Attributes:
        ranks: Number of ranks.
        has_rank_zero: Whether rank 0 is one of them.
        wall_ns: Wall time of each rank.
        parts: Rank time by part; the parts add up to `wall_ns` times `ranks`.
    """

    ranks: int
    has_rank_zero: bool
    wall_ns: int
    parts: Parts


def host_name(name: str) -> str:
    """Return a host's name as it is stored: printable, and at most 255 characters."""
    return printable(name)[:_NAME_CHARACTERS]


def host_shares(attempt: AttemptAccount) -> dict[str, HostShare]:
    """Return the ranks of an attempt by host; the host is empty where it is not known.

    The time since the end of the attempt before counts as this attempt's restart.
    """
    window_ns = attempt.until_ns - attempt.began_ns
    unknown: Parts = {"not_known": window_ns}
    restart: Parts = {"restart": attempt.gap_ns} if attempt.gap_ns else {}
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank in (*attempt.by_rank, *attempt.missing):
        host = attempt.hosts.get(rank, "")
        ranks["" if host == _UNKNOWN else host_name(host)].append(rank)
    for host in sorted(ranks, key=lambda host: (-len(ranks[host]), host))[MAX_HOSTS:]:
        ranks[""] += ranks.pop(host)
    return {
        host: HostShare(
            ranks=len(own),
            has_rank_zero=0 in own,
            wall_ns=min(window_ns + attempt.gap_ns, _MAX_NS),
            parts=added(attempt.by_rank.get(rank, unknown) | restart for rank in own),
        )
        for host, own in ranks.items()
    }


def host_excess_ratios(joined: JoinedSteps, hosts: Mapping[int, str]) -> dict[str, float]:
    """Return the own time of each host's slowest rank over that of the other hosts, as a share of the step.

    A rank's own time is its median over the steps. The other hosts' is the median over them of their median ranks.

    Args:
        joined: Steps of ranks that wait for each other.
        hosts: Host by rank.

    Returns:
        By host; empty with less than two hosts, too few steps, or a rank whose host is not known.
    """
    names = [host_name(hosts.get(rank, "")) for rank in joined.ranks.tolist()]
    distinct, index = np.unique(np.array(names, np.str_), return_inverse=True)
    if len(joined) < MIN_STEPS or len(distinct) < 2 or "" in names:
        return {}
    own_ns, step_ns = joined.usual_own_ns, float(np.median(joined.step_ns))
    by_host = [own_ns[index == number] for number in range(len(distinct))]
    typical_ns = np.array([np.median(own) for own in by_host])
    others_ns = typical_ns - excesses(typical_ns[None])[0]
    slowest_ns = np.array([own.max() for own in by_host])
    return dict(zip(distinct.tolist(), ((slowest_ns - others_ns) / step_ns).tolist(), strict=True))
