"""The fleet report: rank time of all runs of a workspace over weeks, slow hosts, and regressions, from stored totals.

It reads no steps and no spans. Totals are summed while they are read, so that memory grows with the hosts, tags and
versions, and hardly with the runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from ddpobs.shared.words import percent
from ddpobs_server.analysis.account.parts import PARTS, TITLES, is_lost
from ddpobs_server.analysis.fleet.regressions import MIN_RUNS, Loss, Regression, regressions
from ddpobs_server.analysis.fleet.slow_hosts import FALSE_ALARMS
from ddpobs_server.analysis.fleet.sums import Sum, week_begin_ns, week_of, week_shares
from ddpobs_server.reports.host_comparison import HostComparison
from ddpobs_server.store import HostTotal, Store

MAX_RUNS, MAX_TOTALS = 100_000, 400_000
"""Maximum number of runs, and of their totals by host, that are read; the oldest are left out."""
MAX_ROWS = 100
"""Maximum number of rows of a table: those that lose most."""
_NS_PER_HOUR = 3600 * 10**9
_NOT_KNOWN = "not known"
_ALL = ("all runs", "")
_KINDS = {"host": "Runs on host {}", "tag": "Runs with the tag {}", "torch": "Runs with torch {}"}
_Key = tuple[str, str]
"""Kind of a group (`host`, `tag`, `torch`), and its name."""


class _Fleet:
    """Sums over the totals of all runs."""

    def __init__(self, weeks: tuple[int, int]) -> None:
        self._weeks = weeks
        self.total = Sum()
        self.by_week: defaultdict[int, Sum] = defaultdict(Sum)
        self.groups: defaultdict[_Key, Sum] = defaultdict(Sum)
        self.losses: defaultdict[_Key, list[Loss]] = defaultdict(list)

    def add(self, run: str, totals: Sequence[HostTotal]) -> None:
        """Add the totals of a run."""
        for _, of_attempt in groupby(totals, key=lambda total: total.attempt):
            self._add_attempt(run, list(of_attempt))

    def _add_attempt(self, run: str, totals: Sequence[HostTotal]) -> None:
        """Add an attempt. Its time, its tags and its version of torch are the same on all hosts."""
        first, parts = totals[0], _parts_of(totals)
        keys = [("torch", first.torch), *(("tag", tag) for tag in first.tags)]
        shares = list(week_shares(first.began_ns, first.wall_ns, self._weeks))
        for week, share in shares:
            self.by_week[week].add(run, parts, share)
        if share := sum(share for _, share in shares):
            self.total.add(run, parts, share)
            for key in keys:
                self.groups[key].add(run, parts, share)
            for total in totals:
                self.groups["host", total.host].add(run, total.parts, share)
        self._add_loss(week_of(first.began_ns), parts, [_ALL, *keys, *(("host", total.host) for total in totals)])

    def _add_loss(self, week: int, parts: Mapping[str, float], keys: Iterable[_Key]) -> None:
        """Add an attempt's loss to all of its groups, as far as its time is known."""
        if self._weeks[0] <= week <= self._weeks[1]:
            not_known_ns = parts.get("not_known", 0.0)  # It counts as lost elsewhere.
            lost_ns = sum(ns for part, ns in parts.items() if is_lost(part)) - not_known_ns
            loss = Loss(week, sum(parts.values()) - not_known_ns, lost_ns)
            for key in keys:
                self.losses[key].append(loss)


def fleet_json(store: Store, workspace: str, weeks: int, now_ns: int, tag: str | None = None) -> dict[str, Any]:
    """Return the fleet report of a workspace.

    Args:
        store: Source of the totals.
        workspace: The workspace.
        weeks: Number of weeks, with the present one.
        now_ns: The collector's wall clock.
        tag: Only runs with this tag; None for all.
    """
    last = week_of(now_ns)
    first = last - weeks + 1
    fleet, limits = _Fleet((first, last)), _Limits()
    stored = store.fleet_totals(workspace, week_begin_ns(first), MAX_RUNS + 1)
    for run, rows in groupby(limits.within(stored), key=lambda row: row[0]):
        totals = [total for _, total in rows if tag is None or tag in total.tags]
        if totals:
            fleet.add(run, totals)
    hosts = HostComparison(store, workspace, now_ns)
    tables = {kind: _table(fleet.groups, kind) for kind in _KINDS}
    return {
        "weeks": weeks,
        "tag": tag,
        "began_ns": week_begin_ns(first),
        "until_ns": now_ns,
        **_sum_json(fleet.total),
        "by_week": [
            {"began_ns": week_begin_ns(week), **_sum_json(fleet.by_week[week])}
            for week in range(first, last + 1)
            if week in fleet.by_week
        ],
        **{f"by_{kind}": rows for kind, (rows, _) in tables.items()},
        "rows_left_out": {kind: left_out for kind, (_, left_out) in tables.items()},
        "slow_hosts": hosts.slow_hosts,
        "slow_hosts_since_ns": hosts.since_ns,
        "compared_runs": hosts.compared_runs,
        "false_alarms": FALSE_ALARMS,
        "regressions": [_regression_json(found) for found in regressions(fleet.losses)],
        "missing": [*hosts.missing, *_missing(fleet, limits.left_out)],
    }


class _Limits:
    """Ends the totals at the limits, after a whole run."""

    def __init__(self) -> None:
        self.left_out = False

    def within(self, stored: Iterable[tuple[str, HostTotal]]) -> Iterator[tuple[str, HostTotal]]:
        """Return the totals of the first runs."""
        runs, latest = 0, None
        for count, (run, total) in enumerate(stored):
            if run != latest:
                runs, latest = runs + 1, run
                if runs > MAX_RUNS or count >= MAX_TOTALS:
                    self.left_out = True
                    return
            yield run, total


def _parts_of(totals: Sequence[HostTotal]) -> dict[str, float]:
    """Return the sums of some hosts by part; another version of the collector may have stored other parts."""
    sums = dict(totals[0].parts)
    for total in totals[1:]:
        for part, ns in total.parts.items():
            sums[part] = sums.get(part, 0.0) + ns
    return sums


def _table(groups: Mapping[_Key, Sum], kind: str) -> tuple[list[dict[str, Any]], int]:
    """Return the groups of a kind that lose most, and the number of the others."""
    of_kind = [(name, group) for (of, name), group in groups.items() if of == kind]
    of_kind.sort(key=lambda item: (-item[1].lost_ns, item[0]))
    rows = [{"name": name or _NOT_KNOWN, **_sum_json(group)} for name, group in of_kind[:MAX_ROWS]]
    return rows, max(0, len(of_kind) - MAX_ROWS)


def _sum_json(total: Sum) -> dict[str, Any]:
    rank_ns = total.rank_ns
    lost = sorted((part for part in total.parts if is_lost(part)), key=lambda part: -total.parts[part])
    return {
        "runs": total.runs,
        "rank_hours": rank_ns / _NS_PER_HOUR,
        "lost_hours": total.lost_ns / _NS_PER_HOUR,
        "goodput": total.goodput,
        "causes": [
            {
                "part": part,
                "title": TITLES[part],
                "hours": total.parts[part] / _NS_PER_HOUR,
                "share": total.parts[part] / rank_ns,
            }
            for part in lost
            if part in PARTS and total.parts[part] > 0
        ],
    }


def _regression_json(found: Regression) -> dict[str, Any]:
    kind, name = found.group
    group = "All runs" if found.group == _ALL else _KINDS[kind].format(name or _NOT_KNOWN)
    week = datetime.fromtimestamp(week_begin_ns(found.week) / 1e9, UTC)
    text = (
        f"{group} lost {percent(found.lost_share)} of their known time in the week of {week:%Y-%m-%d}, "
        f"and {percent(found.lost_share_before)} in the weeks before."
    )
    return {
        "kind": "all" if found.group == _ALL else kind,
        "name": name or _NOT_KNOWN if found.group != _ALL else "",
        "week_began_ns": week_begin_ns(found.week),
        "runs": found.runs,
        "runs_before": found.runs_before,
        "lost_share": found.lost_share,
        "lost_share_before": found.lost_share_before,
        "chance": found.chance,
        "text": text,
    }


def _missing(fleet: _Fleet, left_out: bool) -> list[str]:
    missing = []
    if len(fleet.losses[_ALL]) < 2 * MIN_RUNS:
        missing.append(f"regressions: {MIN_RUNS} attempts in a week and in the four weeks before are needed")
    if left_out:
        missing.append(f"older runs: more than {MAX_RUNS:,} runs, or {MAX_TOTALS:,} hosts of runs")
    return missing
