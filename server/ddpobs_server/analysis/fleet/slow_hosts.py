"""Hosts that are slow in different jobs, with a bound on false discoveries.

In a job whose slowest host is late by at least `MIN_EXCESS` of the step, exactly one host is the slowest. If slowness
has nothing to do with the host, the slowest rank is any of the job's ranks, so that a host with r of n ranks has it
with probability r / n. The number of jobs in which a host is the slowest then has a Poisson binomial distribution.
Only hosts of the same job are compared: a job that is slow everywhere accuses none.

Sources: R. Barlow and K. Heidtmann, "Computing k-out-of-n system reliability", IEEE Transactions on
Reliability 33 (1984), for the exact distribution; S. Holm, "A simple sequentially rejective multiple test procedure",
Scandinavian Journal of Statistics 6 (1979), for the bound, which holds for tests that depend on each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

MIN_EXCESS = 0.02
"""Minimum lateness of a job's slowest host, as a share of the step, from which on the job counts."""
MIN_JOBS = 3
"""Minimum number of jobs in which a host that is named was the slowest."""
FALSE_ALARMS = 0.05
"""Maximum probability that any host is named which is no slower than the others."""
MAX_JOBS = 500
"""Latest jobs of a host that are judged."""


@dataclass(frozen=True)
class HostInJob:
    """A host of a job.

    Attributes:
        host: Its name.
        ranks: Number of its ranks.
        excess_ratio: Its lateness as `host_excess_ratios` has it.
        has_rank_zero: Whether rank 0 is one of its ranks.
    """

    host: str
    ranks: int
    excess_ratio: float
    has_rank_zero: bool = False


@dataclass(frozen=True)
class SlowHost:
    """A host that is the slowest of its jobs more often than chance explains.

    Attributes:
        host: Its name.
        jobs: Jobs that count, of those in which it took part.
        slow_jobs: Jobs in which it was the slowest.
        expected_jobs: The same by chance.
        rank_zero_jobs: Jobs of `slow_jobs` in which it held rank 0.
        excess_ratio: Its median lateness in `slow_jobs`, as a share of the step.
        chance: Probability of so many slow jobs by chance.
    """

    host: str
    jobs: int
    slow_jobs: int
    expected_jobs: float
    rank_zero_jobs: int
    excess_ratio: float
    chance: float


@dataclass
class _Record:
    shares: list[float] = field(default_factory=list)
    excesses: list[float] = field(default_factory=list)
    rank_zero_jobs: int = 0


def slow_hosts(jobs: Iterable[Sequence[HostInJob]]) -> list[SlowHost]:
    """Return the hosts that are slow in different jobs, the least likely by chance first.

    With probability 1 - `FALSE_ALARMS` no host is named that is no slower than the others.

    Args:
        jobs: Hosts of each job, the newest job first. A job with one host does not count.
    """
    judged = [_judged(host, record) for host, record in _records(jobs).items()]
    judged.sort(key=lambda host: (host.chance, host.host))
    named = []
    for index, host in enumerate(judged):
        if host.chance > FALSE_ALARMS / (len(judged) - index):
            break
        if host.slow_jobs >= MIN_JOBS:
            named.append(host)
    return named


def _records(jobs: Iterable[Sequence[HostInJob]]) -> dict[str, _Record]:
    records: defaultdict[str, _Record] = defaultdict(_Record)
    for job in jobs:
        slowest = max(job, key=lambda host: host.excess_ratio, default=None)
        if slowest is None or len(job) < 2 or slowest.excess_ratio < MIN_EXCESS:
            continue
        ranks = sum(host.ranks for host in job)
        for host in job:
            record = records[host.host]
            if len(record.shares) < MAX_JOBS:
                record.shares.append(host.ranks / ranks)
                if host is slowest:
                    record.excesses.append(host.excess_ratio)
                    record.rank_zero_jobs += host.has_rank_zero
    return records


def _judged(host: str, record: _Record) -> SlowHost:
    slow_jobs, expected = len(record.excesses), sum(record.shares)
    return SlowHost(
        host=host,
        jobs=len(record.shares),
        slow_jobs=slow_jobs,
        expected_jobs=expected,
        rank_zero_jobs=record.rank_zero_jobs,
        excess_ratio=float(np.median(record.excesses)) if record.excesses else 0.0,
        chance=at_least(slow_jobs, record.shares) if slow_jobs > expected else 1.0,
    )


def at_least(count: int, shares: Sequence[float]) -> float:
    """Return the probability that at least `count` of independent events happen.

    Args:
        count: The number.
        shares: Probability of each event.
    """
    probability = np.zeros(len(shares) + 1)
    probability[0] = 1.0
    for number, share in enumerate(shares, 1):
        probability[1 : number + 1] = probability[1 : number + 1] * (1 - share) + probability[:number] * share
        probability[0] *= 1 - share
    return float(probability[count:].sum())
