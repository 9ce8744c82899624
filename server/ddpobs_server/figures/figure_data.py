"""What the figures of an attempt are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpobs import wire
from ddpobs_server.analysis.finding import first_names
from ddpobs_server.reports.columns import RunColumns
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.views import RunViews

Buckets = Mapping[tuple[int, int, int], tuple[int, str]]
"""Size in bytes and names of parameters, by module, revision and bucket."""


@dataclass(frozen=True)
class FigureData:
    """Reads the reports and the columns of one attempt.

    Attributes:
        views: Columns, bounded in size.
        reports: Findings, accounts and bins.
    """

    views: RunViews
    reports: Reports

    def account(self) -> dict[str, Any]:
        """Return the run's account in the form of the REST API."""
        return self.reports.account(self.views.run, self.views.attempt)

    def findings(self) -> Sequence[Mapping[str, Any]]:
        """Return the findings in the form of the REST API."""
        found: Sequence[Mapping[str, Any]] = self.reports.diagnostics_for_marks(self.views.run, self.views.attempt)[
            "findings"
        ]
        return found

    def step_bins(self, bounds: tuple[int | None, int | None], most: int, rank: int | None) -> dict[str, wire.Ints]:
        """Return at most so many bins of the steps of one rank, or of the mean over all ranks."""
        run, attempt = self.views.run, self.views.attempt
        columns = RunColumns(self.views.store, run, attempt)
        return columns.step_bins(bounds, most, rank, mean=rank is None)[0]

    def hosts(self) -> dict[int, str]:
        """Return the host of each rank."""
        return {source.rank: source.hello.host if source.hello else "" for source in self.views.sources}

    def buckets(self) -> Buckets:
        """Return size and names of each bucket's parameters."""
        return {
            (layout.module, layout.revision, index): (
                bucket.size_bytes,
                first_names([p.name for p in bucket.parameters]),
            )
            for layout in self.views.layouts()
            for index, bucket in enumerate(layout.buckets)
        }
