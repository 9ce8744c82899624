"""What the figures of an attempt are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddpobs import wire
from ddpobs.shared.words import Parts, bucket_name, bucket_phrase, bucket_title, parts_of
from ddpobs_server.analysis.finding import first_names
from ddpobs_server.reports.columns import RunColumns
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.views import RunViews

Key = tuple[int, int, int]
"""Module, revision and index of a bucket."""

_TICK_CHARACTERS = 14


@dataclass(frozen=True)
class Buckets:
    """The buckets of an attempt's layouts, or its units' collectives. Those of an unknown layout have no facts.

    Attributes:
        known: By module, revision and index.
    """

    known: Mapping[Key, wire.Bucket]

    @cached_property
    def parts(self) -> Parts:
        """What they are called."""
        return parts_of(self.known.values())

    def title(self, key: Key) -> str:
        """Name of a unit's collective, `reduce-scatter of unit blocks.3`; a bucket's number, `0.2`."""
        bucket = self.known.get(key)
        return bucket_title(key[0], key[2], bucket) if bucket and bucket.unit else bucket_name(key[0], key[2])

    def tick(self, key: Key) -> str:
        """A short name below an axis: the end of the unit's name, or the bucket's number."""
        bucket = self.known.get(key)
        unit = bucket.unit if bucket else ""
        return (
            f"…{unit[-_TICK_CHARACTERS:]}" if len(unit) > _TICK_CHARACTERS + 1 else unit or bucket_name(key[0], key[2])
        )

    def phrase(self, key: Key) -> str:
        """The same within a sentence, `the reduce-scatter of unit blocks.3`, `bucket 0.2`."""
        return bucket_phrase(key[0], key[2], self.known.get(key))

    def parameters(self, key: Key) -> str:
        """The first names of its parameters."""
        bucket = self.known.get(key)
        return first_names([parameter.name for parameter in bucket.parameters]) if bucket else ""

    def size_bytes(self, key: Key) -> int:
        """Its size; 0 if it is not known."""
        bucket = self.known.get(key)
        return bucket.size_bytes if bucket else 0


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
        """Return facts of the buckets of all layouts."""
        return Buckets(
            {
                (layout.module, layout.revision, index): bucket
                for layout in self.views.layouts()
                for index, bucket in enumerate(layout.buckets)
            }
        )
