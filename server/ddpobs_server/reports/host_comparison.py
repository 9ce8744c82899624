"""Hosts that are slow in different runs of a workspace.

The comparison does not depend on what a reader asks for, so that its bound holds for all readers and all times: it
begins at a fixed date, and each run counts once, when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any

from ddpobs.shared.quantities import counted
from ddpobs.shared.words import percent
from ddpobs_server.analysis.fleet.slow_hosts import HostInJob, SlowHost, slow_hosts
from ddpobs_server.analysis.fleet.sums import week_begin_ns, week_of
from ddpobs_server.store import ComparedHost, Store

WEEKS = 12
"""The comparison begins with the period of so many weeks before the present one: a later begin would be a new test."""
_SILENT_NS = 120 * 10**9
"""A run without a batch for this long has ended."""


class HostComparison:
    """The slow hosts of a workspace.

    Args:
        store: Source of the runs.
        workspace: The workspace.
        now_ns: The collector's wall clock.

    Attributes:
        since_ns: Begin of the comparison as Unix time, in ns.
        slow_hosts: The slow hosts, as the report has them.
        compared_runs: Number of runs whose hosts were compared.
        missing: Why runs were not compared.
    """

    def __init__(self, store: Store, workspace: str, now_ns: int) -> None:
        self.since_ns = week_begin_ns(WEEKS * (week_of(now_ns) // WEEKS - 1))
        self.compared_runs = self._single_host_runs = self._uncompared_runs = 0
        stored = store.compared_hosts(workspace, self.since_ns, now_ns - _SILENT_NS)
        self.slow_hosts = [_json(host) for host in slow_hosts(self._jobs(stored))]
        self.missing = self._missing()

    def _jobs(self, stored: Iterable[ComparedHost]) -> Iterator[list[HostInJob]]:
        """Return the hosts of each run's latest attempt whose hosts were compared: a run is one job."""
        for _, rows in groupby(stored, key=attrgetter("run")):
            hosts = list(rows)
            compared = [host for host in hosts if host.excess_ratio is not None]
            if compared:
                self.compared_runs += 1
                yield [
                    HostInJob(host.host, host.ranks, host.excess_ratio, bool(host.has_rank_zero))
                    for host in compared
                    if host.attempt == compared[-1].attempt and host.excess_ratio is not None
                ]
            elif len({host.host for host in hosts}) == 1:
                self._single_host_runs += 1
            else:
                self._uncompared_runs += 1

    def _missing(self) -> list[str]:
        missing = []
        if not self.compared_runs:
            missing.append("slow hosts: no ended run with several hosts has enough compared steps")
        for count, reason in (
            (self._single_host_runs, "has one host"),
            (self._uncompared_runs, "has too few steps, or ranks that do not all wait for each other"),
        ):
            if count:
                missing.append(f"slow hosts: {counted(count, 'run')} left out, each {reason}")
        return missing


def _json(host: SlowHost) -> dict[str, Any]:
    text = (
        f"{host.host} was the slowest host in {host.slow_jobs} of {counted(host.jobs, 'job')}; "
        f"{host.expected_jobs:.1f} are expected by chance. It was late by {percent(host.excess_ratio)} of a step."
    )
    if host.rank_zero_jobs == host.slow_jobs:
        text += " It held rank 0 in all of them: the work of rank 0 may be the cause."
    return {
        "host": host.host,
        "jobs": host.jobs,
        "slow_jobs": host.slow_jobs,
        "expected_jobs": host.expected_jobs,
        "rank_zero_jobs": host.rank_zero_jobs,
        "excess_ratio": host.excess_ratio,
        "chance": host.chance,
        "text": text,
    }
