"""Makes each picture of a run from the reports and the columns."""

from __future__ import annotations

from collections.abc import Callable

from ddpobs_server.figures import account, buckets, overview, phases, ranks, step
from ddpobs_server.figures.picture import Picture
from ddpobs_server.figures.selection import Name, RankFilter, Selection
from ddpobs_server.figures.theme import Theme, theme
from ddpobs_server.reports.columns import RunColumns
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.views import RunViews
from ddpobs_server.store import Store

_BINS, _PHASE_BINS, _COLUMNS = 400, 250, 300
"""Most bins of the pictures over steps."""
_NAMED_PARAMETERS = 4


class Maker:
    """Makes pictures.

    Args:
        store: Source of the columns.
        reports: Source of findings, accounts and bins.
    """

    def __init__(self, store: Store, reports: Reports) -> None:
        self._store, self._reports = store, reports

    def make(self, views: RunViews, name: Name, selection: Selection) -> Picture:
        """Return a picture of an attempt."""
        makers: dict[Name, Callable[[RunViews, Selection], Picture]] = {
            "account": self._account,
            "overview": self._overview,
            "phases": self._phases,
            "ranks": self._ranks,
            "step": self._step,
            "buckets": self._buckets,
        }
        return makers[name](views, selection)

    def _account(self, views: RunViews, selection: Selection) -> Picture:
        return account.account(self._reports.account(views.run, views.attempt), _theme(selection))

    def _overview(self, views: RunViews, selection: Selection) -> Picture:
        bins, _ = RunColumns(views.store, views.run, views.attempt).step_bins((None, None), _BINS, None, mean=True)
        findings = self._reports.diagnostics_for_marks(views.run, views.attempt)["findings"]
        return overview.overview(bins, findings, _theme(selection))

    def _phases(self, views: RunViews, selection: Selection) -> Picture:
        bounds, rank = (selection.first, selection.last), selection.rank
        bins, _ = RunColumns(views.store, views.run, views.attempt).step_bins(
            bounds, _PHASE_BINS, rank, mean=rank is None
        )
        return phases.phases(bins, rank, _theme(selection))

    def _ranks(self, views: RunViews, selection: Selection) -> Picture:
        delays = views.delays(selection.first, selection.last, _COLUMNS)
        hosts = _hosts(views)
        compared = set() if delays is None else set(delays.ranks.tolist())
        shown = RankFilter(selection.match, selection.order, hosts)
        return ranks.ranks(delays, shown, sorted(hosts.keys() - compared), _theme(selection))

    def _step(self, views: RunViews, selection: Selection) -> Picture:
        timeline = views.timeline(selection.step, selection.first, selection.last)
        hosts = _hosts(views)
        shown = RankFilter(selection.match, "rank", hosts)
        known = [rank for rank in dict.fromkeys([*timeline.by_own_time, *sorted(hosts)]) if shown.includes(rank)]
        if selection.rank in known:
            known = [selection.rank, *(rank for rank in known if rank != selection.rank)]
        return step.step(timeline, known, self._parameters(views), _theme(selection))

    def _buckets(self, views: RunViews, selection: Selection) -> Picture:
        times = views.buckets(selection.first, selection.last)
        return buckets.buckets(times, self._parameters(views), _theme(selection))

    def _parameters(self, views: RunViews) -> dict[tuple[int, int, int], tuple[int, str]]:
        """Return size and names of each bucket's parameters."""
        return {
            (layout.module, layout.revision, index): (bucket.size_bytes, _names([p.name for p in bucket.parameters]))
            for layout in views.layouts()
            for index, bucket in enumerate(layout.buckets)
        }


def _theme(selection: Selection) -> Theme:
    return theme(dark=selection.dark, legend_columns=selection.legend)


def _hosts(views: RunViews) -> dict[int, str]:
    return {source.rank: source.hello.host if source.hello else "" for source in views.sources()}


def _names(names: list[str]) -> str:
    more = len(names) - _NAMED_PARAMETERS
    return ", ".join(names[:_NAMED_PARAMETERS]) + (f" and {more} more" if more > 0 else "")
