"""Hosts that are slow in different jobs, with a bound on false discoveries over all looks.

In a job whose slowest host is late by at least `MIN_EXCESS` of the step, exactly one host is the slowest. If slowness
has nothing to do with the host, the slowest rank is any of the job's ranks, so that a host with r of n ranks has it
with probability r / n. Only hosts of the same job are compared: a job that is slow everywhere accuses none.

The list is read after each job, so that a test for a single look would name a fast host sooner or later. Here a
capital of 1 bets in each job that the odds of a host are `_ODDS` times as high as by chance. By chance the capital
stays a nonnegative martingale, and by Ville's inequality it ever reaches c with probability at most 1 / c. A part of
the capital is kept for later jobs, because a host may become slow at any time, and capital far above what names a
host is given away, because a host may be repaired. A host gets its share of
`FALSE_ALARMS` when it first appears; the shares of any number of hosts add up to at most 1.

Source: A. Ramdas, P. Grünwald, V. Vovk and G. Shafer, "Game-theoretic statistics and safe anytime-valid inference",
Statistical Science 38 (2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

MIN_EXCESS = 0.02
"""Minimum lateness of a job's slowest host, as a share of the step, from which on the job counts."""
MIN_JOBS = 3
"""Minimum number of jobs in which a host that is named was the slowest."""
FALSE_ALARMS = 0.05
"""Maximum probability that any host is ever named which is no slower than the others."""
_ODDS = 32.0
_FIRST_STAKE = 0.75
"""Part of the capital that is bet from the first job on; half of it would find a later change by one job earlier."""
_MAX_EXCESS = 1000.0
"""Most capital, as a multiple of what names the host: it goes in 3 to 10 jobs in which a repaired host is not slow."""
_EQUALS = 5
"""About so many hosts, the first ones, get almost equal shares of `FALSE_ALARMS`."""


class HostInJob(NamedTuple):
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
        chance: Upper bound of the probability that the host ever looks as slow by chance.
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
    """A host's jobs, and the capital that bets on its slowness: `kept` for later jobs, and `staked`."""

    number: int
    jobs: int = 0
    expected_jobs: float = 0.0
    rank_zero_jobs: int = 0
    excesses: list[float] = field(default_factory=list)
    kept: float = 1.0
    staked: float = 0.0

    def bet(self, share: float, *, is_slowest: bool) -> None:
        """Add a job, in which the host is the slowest by chance with probability `share`."""
        self.jobs += 1
        self.expected_jobs += share
        stake = self.kept * (_FIRST_STAKE if self.jobs == 1 else 1 / (self.jobs + 1))
        self.kept -= stake
        won = (self.staked + stake) * (_ODDS if is_slowest else 1.0) / (1 - share + _ODDS * share)
        self.staked = min(won, _MAX_EXCESS / self.max_chance)

    @property
    def chance(self) -> float:
        return min(1.0, 1 / (self.kept + self.staked))

    @property
    def max_chance(self) -> float:
        """The host's share of `FALSE_ALARMS`: c / ((k + c)(k + c - 1)) for the k-th host, which add up to 1."""
        return FALSE_ALARMS * _EQUALS / ((self.number + _EQUALS) * (self.number + _EQUALS - 1))


def slow_hosts(jobs: Iterable[Sequence[HostInJob]]) -> list[SlowHost]:
    """Return the hosts that are slow in different jobs, the least likely by chance first.

    With probability 1 - `FALSE_ALARMS` no host that is no slower than the others is named after any of the jobs.

    Args:
        jobs: Hosts of each job in an order that does not depend on their lateness, the oldest job first. A job with
            one host does not count.
    """
    records: dict[str, _Record] = {}
    for job in jobs:
        slowest = max(job, key=lambda host: host.excess_ratio, default=None)
        if slowest is None or len(job) < 2 or slowest.excess_ratio < MIN_EXCESS:
            continue
        ranks = sum(host.ranks for host in job)
        for host in job:
            if (record := records.get(host.host)) is None:
                record = records[host.host] = _Record(len(records) + 1)
            record.bet(host.ranks / ranks, is_slowest=host is slowest)
            if host is slowest:
                record.excesses.append(host.excess_ratio)
                record.rank_zero_jobs += host.has_rank_zero
    named = [
        _slow_host(host, record)
        for host, record in records.items()
        if len(record.excesses) >= MIN_JOBS and record.chance <= record.max_chance
    ]
    return sorted(named, key=lambda host: (host.chance, host.host))


def _slow_host(host: str, record: _Record) -> SlowHost:
    return SlowHost(
        host=host,
        jobs=record.jobs,
        slow_jobs=len(record.excesses),
        expected_jobs=record.expected_jobs,
        rank_zero_jobs=record.rank_zero_jobs,
        excess_ratio=float(np.median(record.excesses)),
        chance=record.chance,
    )
