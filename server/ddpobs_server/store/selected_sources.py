"""The sources whose rows a statement reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import CTE, ColumnElement, Select, Table, select, true

from ddpobs_server.store import schema

_r, _s = schema.runs.c, schema.sources.c
_SOURCE = (_s.run_id, _s.source, _s.rank)


@dataclass(frozen=True)
class SelectedSources:
    """Sources, as a part of a statement that is read first.

    Attributes:
        cte: Run, source and rank of each.
        run: Their run; None if they may be of several.
    """

    cte: CTE
    run: str | None = None

    @property
    def c(self) -> Any:
        """The columns of `cte`."""
        return self.cte.c

    def joined(self, table: Table) -> tuple[Table, ColumnElement[bool]]:
        """Target and condition of a join with the table's rows of these sources."""
        return table, (table.c.run_id == self.c.run_id) & (table.c.source == self.c.source) & self.in_run(table)

    def in_run(self, table: Table) -> ColumnElement[bool]:
        """Condition for the table's rows of `run`, true without it.

        A cluster reads a single node only if the run of each table is known before the sources are read.
        """
        return true() if self.run is None else table.c.run_id == self.run


def sources_of_attempt(run: str, attempt: str) -> SelectedSources:
    """Sources of an attempt of a run."""
    return SelectedSources(_read_first(select(*_SOURCE).where(_s.run_id == run, _s.attempt == attempt)), run)


def sources_of_latest(conditions: Sequence[ColumnElement[bool]]) -> SelectedSources:
    """Sources of the latest attempts of the runs that meet the conditions."""
    latest = (_r.run_id == _s.run_id) & (_r.attempt == _s.attempt)
    return SelectedSources(_read_first(select(*_SOURCE).join(schema.runs, latest).where(*conditions)))


def _read_first(sources: Select[Any]) -> CTE:
    """Read the sources first, then their rows by key. Otherwise SQLite looks up the source of every row."""
    return sources.cte("reporting").prefix_with("MATERIALIZED")
