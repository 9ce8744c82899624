"""The pictures of all runs, cached as long as a run does not change.

Bokeh is imported for the first picture: that takes half a second, which a collector needs to start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ddpobs_server.figures.figure_data import FigureData
from ddpobs_server.figures.registry import figure_kinds
from ddpobs_server.figures.report_tables import ReportTable
from ddpobs_server.figures.selection import Selection
from ddpobs_server.reports.cache import Cache
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.run_state import report_version
from ddpobs_server.reports.views import RunViews
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store

_REPORT_LEGEND = 6
"""Columns of a legend that are as wide as a report."""
_MAX_CACHED = 32
"""Pictures in memory: about 100 kB each."""


class Pictures:
    """Makes pictures, and the report of a run.

    Args:
        store: Source of the columns.
        reports: Source of findings, accounts and bins.
        settings: Limits of a run's state.
        now_ns: The collector's wall clock.
    """

    def __init__(
        self, store: Store, reports: Reports, settings: Settings, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._store, self._reports, self._settings, self._now_ns = store, reports, settings, now_ns
        self._cache: Cache[dict[str, Any]] = Cache(_MAX_CACHED)

    def picture(self, run: str, attempt: str, name: str, selection: Selection) -> dict[str, Any]:
        """Return a picture of an attempt in the form of the REST API."""

        def make() -> dict[str, Any]:
            data = FigureData(RunViews(self._store, run, attempt), self._reports)
            return figure_kinds()[name].make(data, selection).as_json()

        version = report_version(self._store.version(run), self._settings, self._now_ns())
        return self._cache.get((run, attempt, name, selection), version, make)

    def page(self, run: str, attempt: str, name: str, selection: Selection) -> tuple[str, str]:
        """Return a page with one picture that needs no other file, and the nonce of its scripts."""
        from ddpobs_server.figures.report_page import figure_page

        return figure_page(run.rpartition("/")[2], self.picture(run, attempt, name, selection), selection.dark)

    def report(
        self,
        run: str,
        attempt: str,
        address: str,
        facts: dict[str, str],
        *,
        tables: Sequence[ReportTable],
    ) -> tuple[str, str]:
        """Return a page with the findings and all pictures that needs no other file, and the nonce of its scripts.

        Args:
            run: Key of the run.
            attempt: The attempt.
            address: Address of the run's page.
            facts: Facts of the run, in order.
            tables: Tables below the figures.
        """
        from ddpobs_server.figures.report_page import report_page

        diagnosis = self._reports.diagnostics(run, attempt)
        pictures = [self.picture(run, attempt, name, Selection(legend=_REPORT_LEGEND)) for name in figure_kinds()]
        return report_page(run.rpartition("/")[2], address, facts, diagnosis, pictures, tables=tables)
