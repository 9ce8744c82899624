"""Totals by host of the attempts that a diagnosis has read, until they are written."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ddpobs.wire import printable
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.findings.straggler import UNEVEN
from ddpobs_server.analysis.fleet.host_shares import MIN_STEPS, host_excess_ratios, host_shares
from ddpobs_server.analysis.slow_ranks.work import at_equal_work, uneven_constant_work
from ddpobs_server.reports.run_state import ReportVersion
from ddpobs_server.store import HostTotal, trained_labels

_ATTEMPTS = 8
"""Latest attempts of a training whose totals are made anew: a later attempt changes those before it."""
_CHARACTERS, _TAGS = 64, 16
"""Maximum characters of a version and of a tag, and maximum number of tags."""
_MAX_RUNS = 1000
"""Maximum number of runs whose totals wait."""


def host_totals(evidence: Evidence, attempt: str) -> list[HostTotal]:
    """Return the totals by host of an attempt and of those before it; `began_ns` and `commits` are still 0.

    Hosts are compared at equal work. They are not compared if their ranks do not all wait for each other, as in a
    pipeline, or if one size of batches per rank makes more work look like a slow machine.
    """
    account = evidence.account
    if account is None:
        return []
    hello = next(iter(evidence.hellos.values()), None)
    torch = printable(hello.versions.get("torch", ""))[:_CHARACTERS] if hello is not None else ""
    tags = tuple(printable(tag)[:_CHARACTERS] for tag in trained_labels(hello)[0][:_TAGS])
    excesses = _excess_ratios(evidence)
    return [
        HostTotal(
            attempt=part.attempt,
            host=host,
            commits=0,
            began_ns=0,
            wall_ns=share.wall_ns,
            ranks=share.ranks,
            has_rank_zero=share.has_rank_zero,
            torch=torch,
            tags=tags,
            parts={name: float(ns) for name, ns in share.parts.items()},
            excess_ratio=excesses.get(host) if part.attempt == attempt else None,
        )
        for part in account.attempts[-_ATTEMPTS:]
        for host, share in host_shares(part).items()
    ]


def _excess_ratios(evidence: Evidence) -> dict[str, float]:
    if evidence.stages or evidence.separate_groups_reason or evidence.averages_apart:
        return {}
    joined = evidence.joined
    if len(joined) < MIN_STEPS or uneven_constant_work(joined, evidence.steps, UNEVEN) is not None:
        return {}
    if (fit := evidence.work_fit) is not None:
        joined = at_equal_work(joined, fit)
    return host_excess_ratios(joined, evidence.hosts)


class UnwrittenTotals:
    """The latest totals of each run. Safe to use from several threads; without room, those that wait longest go."""

    def __init__(self) -> None:
        self._totals: OrderedDict[str, tuple[ReportVersion, list[HostTotal]]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, run: str, version: ReportVersion, totals: list[HostTotal]) -> None:
        """Replace the totals of a run."""
        with self._lock:
            self._totals[run] = version, totals
            self._totals.move_to_end(run)
            while len(self._totals) > _MAX_RUNS:
                self._totals.popitem(last=False)

    def take(self) -> dict[str, tuple[ReportVersion, list[HostTotal]]]:
        """Return the version and the totals of each run, and forget them."""
        with self._lock:
            totals, self._totals = self._totals, OrderedDict()
        return totals
