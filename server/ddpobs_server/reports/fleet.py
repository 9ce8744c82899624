"""The fleet report: rank time of all runs of a workspace over weeks, slow hosts, and regressions, from stored totals.

It reads no steps and no spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ddpobs.shared.words import percent
from ddpobs_server.analysis.account.parts import PARTS, TITLES, is_lost
from ddpobs_server.analysis.fleet.regressions import MIN_RUNS, Losses, Regression, regressions
from ddpobs_server.analysis.fleet.slow_hosts import FALSE_ALARMS
from ddpobs_server.analysis.fleet.sums import Sum, week_begin_ns, week_of
from ddpobs_server.reports.fleet_sums import ALL, FleetSums, Key, with_tag
from ddpobs_server.reports.host_comparison import HostComparison
from ddpobs_server.store import HostTotals, Store

MAX_RUNS, MAX_TOTALS = 100_000, 400_000
"""Maximum number of runs, and of their totals by host, that are read; the oldest are left out."""
MAX_ROWS = 100
"""Maximum number of rows of a table: those that lose most."""
_NS_PER_HOUR = 3600 * 10**9
_NOT_KNOWN = "not known"
_KINDS = {"host": "Runs on host {}", "tag": "Runs with the tag {}", "torch": "Runs with torch {}"}


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
    fleet, limits = FleetSums((first, last)), _Limits()
    for page in limits.within(store.fleet_totals(workspace, week_begin_ns(first), MAX_RUNS + 1)):
        fleet.add(page if tag is None else with_tag(page, tag))
    hosts = HostComparison(store, workspace, now_ns)
    groups, losses = fleet.groups(), fleet.losses()
    tables = {kind: _table(groups, kind) for kind in _KINDS}
    return {
        "weeks": weeks,
        "tag": tag,
        "began_ns": week_begin_ns(first),
        "until_ns": now_ns,
        **_sum_json(groups.get(ALL, Sum(0, {}))),
        "by_week": [{"began_ns": week_begin_ns(week), **_sum_json(total)} for week, total in fleet.by_week().items()],
        **{f"by_{kind}": rows for kind, (rows, _) in tables.items()},
        "rows_left_out": {kind: left_out for kind, (_, left_out) in tables.items()},
        "slow_hosts": hosts.slow_hosts,
        "slow_hosts_since_ns": hosts.since_ns,
        "compared_runs": hosts.compared_runs,
        "false_alarms": FALSE_ALARMS,
        "regressions": [_regression_json(found) for found in regressions(losses)],
        "missing": [*hosts.missing, *_missing(losses, limits.left_out)],
    }


class _Limits:
    """Ends the totals at the limits, after a whole run."""

    def __init__(self) -> None:
        self.left_out = False

    def within(self, pages: Iterable[HostTotals]) -> Iterator[HostTotals]:
        """Return the totals of the first runs."""
        runs = totals = 0
        for page in pages:
            begins = [row for row, run in enumerate(page.run) if not row or run != page.run[row - 1]]
            for begin in begins:
                runs += 1
                if runs > MAX_RUNS or totals + begin >= MAX_TOTALS:
                    self.left_out = True
                    yield HostTotals._make(column[:begin] for column in page)
                    return
            totals += len(page.run)
            yield page


def _table(groups: Mapping[Key, Sum], kind: str) -> tuple[list[dict[str, Any]], int]:
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
    group = "All runs" if found.group == ALL else _KINDS[kind].format(name or _NOT_KNOWN)
    week = datetime.fromtimestamp(week_begin_ns(found.week) / 1e9, UTC)
    text = (
        f"{group} lost {percent(found.lost_share)} of their known time in the week of {week:%Y-%m-%d}, "
        f"and {percent(found.lost_share_before)} in the weeks before."
    )
    return {
        "kind": "all" if found.group == ALL else kind,
        "name": name or _NOT_KNOWN if found.group != ALL else "",
        "week_began_ns": week_begin_ns(found.week),
        "runs": found.runs,
        "runs_before": found.runs_before,
        "lost_share": found.lost_share,
        "lost_share_before": found.lost_share_before,
        "chance": found.chance,
        "text": text,
    }


def _missing(losses: Mapping[Key, Losses], left_out: bool) -> list[str]:
    missing = []
    if ALL not in losses or len(losses[ALL].week) < 2 * MIN_RUNS:
        missing.append(f"regressions: {MIN_RUNS} attempts in a week and in the four weeks before are needed")
    if left_out:
        missing.append(f"older runs: more than {MAX_RUNS:,} runs, or {MAX_TOTALS:,} hosts of runs")
    return missing
