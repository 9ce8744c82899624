"""The fleet's sums by arrays are those of a plain loop over the totals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, groupby

import pytest
from ddpobs_server.analysis.account.parts import PARTS, is_lost
from ddpobs_server.analysis.fleet.sums import WEEK_NS, Sum, week_begin_ns, week_of
from ddpobs_server.reports.fleet_sums import ALL, FleetSums, Key
from ddpobs_server.store import HostTotals
from hypothesis import given, settings
from hypothesis import strategies as st

WEEKS = (2900, 2903)
Row = tuple[str, str, str, int, int, str, tuple[str, ...], dict[str, float]]
"""A row of `HostTotals`."""
Attempt = tuple[int, int, str, tuple[str, ...], dict[str, dict[str, float]]]
"""Begin, length, torch, tags, and the parts on each host."""
_times = st.dictionaries(st.sampled_from([*PARTS[:4], "not_known", "of a later version"]), st.integers(0, 10**14))
_names = st.sampled_from(["", "a", "b"])


@st.composite
def attempts(draw: st.DrawFn) -> list[Attempt]:
    """Attempts of a run."""
    begin = st.integers(week_begin_ns(WEEKS[0] - 2), week_begin_ns(WEEKS[1] + 2))
    length = st.sampled_from([0, 1, WEEK_NS - 1, WEEK_NS, 3 * WEEK_NS + 7])
    tags = st.lists(st.sampled_from(["nlp", "large"]), unique=True).map(tuple)
    hosts = st.dictionaries(_names, _times, min_size=1)
    return draw(st.lists(st.tuples(begin, length, _names, tags, hosts), min_size=1, max_size=3))


def rows_of(runs: Iterable[list[Attempt]]) -> list[Row]:
    return [
        (f"run-{run}", f"attempt-{attempt}", host, began_ns, wall_ns, torch, tags, parts)
        for run, own in enumerate(runs)
        for attempt, (began_ns, wall_ns, torch, tags, hosts) in enumerate(own)
        for host, parts in sorted(hosts.items())
    ]


class Plain:
    """The sums, one total after the other."""

    def __init__(self, rows: list[Row]) -> None:
        self.runs: defaultdict[Key | int, set[str]] = defaultdict(set)
        self.parts: defaultdict[Key | int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.losses: defaultdict[Key, list[tuple[int, float, float]]] = defaultdict(list)
        for _, own in groupby(rows, key=lambda row: row[:2]):
            self._add(list(own))

    def _add(self, rows: list[Row]) -> None:
        run, _, _, began_ns, wall_ns, torch, tags, _ = rows[0]
        keys: list[Key] = [ALL, ("torch", torch), *(("tag", tag) for tag in tags)]
        for week in range(WEEKS[0], WEEKS[1] + 1):
            begin_ns = week_begin_ns(week)
            inside_ns = min(began_ns + wall_ns, begin_ns + WEEK_NS) - max(began_ns, begin_ns)
            share = inside_ns / wall_ns if wall_ns else float(week == week_of(began_ns))
            for _, _, host, *_, parts in rows if share > 0 else []:
                own: list[Key | int] = [week, *keys, ("host", host)]
                for key in own:
                    self.runs[key].add(run)
                    for part, ns in parts.items():
                        self.parts[key][part] += ns * share
        if WEEKS[0] <= week_of(began_ns) <= WEEKS[1]:
            known = [(part, ns) for row in rows for part, ns in row[-1].items() if part != "not_known"]
            lost_ns = sum(ns for part, ns in known if is_lost(part))
            for key in (*keys, *(("host", row[2]) for row in rows)):
                self.losses[key].append((week_of(began_ns), sum(ns for _, ns in known), lost_ns))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(attempts(), max_size=4), max_size=3))
def test_the_sums_of_pages_are_those_of_a_loop(
    pages: list[list[list[Attempt]]],
) -> None:
    fleet, rows = FleetSums(WEEKS), rows_of(run for page in pages for run in page)
    begin = 0
    for page in pages:
        names = {f"run-{begin + number}" for number in range(len(page))}
        begin += len(page)
        own = [row for row in rows if row[0] in names]
        fleet.add(HostTotals._make(zip(*own, strict=True) if own else [()] * 8))
    plain = Plain(rows)
    sums: dict[Key | int, Sum] = dict(chain(fleet.groups().items(), fleet.by_week().items()))
    assert {key: total.runs for key, total in sums.items()} == {key: len(runs) for key, runs in plain.runs.items()}
    for key, total in sums.items():
        assert {part: ns for part, ns in total.parts.items() if ns} == pytest.approx(
            {part: ns for part, ns in plain.parts[key].items() if ns}
        )
    losses = {key: list(zip(*(column.tolist() for column in own), strict=True)) for key, own in fleet.losses().items()}
    assert losses == plain.losses
