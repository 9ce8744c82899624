"""The sources whose rows a statement reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    Result,
    Select,
    String,
    Table,
    bindparam,
    select,
    true,
)

from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import execute_built

_r, _s = schema.runs.c, schema.sources.c
_SOURCE = (_s.run_id, _s.source, _s.rank)
ACTIVE_RUNS = (
    _r.workspace == bindparam("workspace", type_=String),
    _r.last_seen_ns.between(bindparam("since_ns", type_=BigInteger), bindparam("until_ns", type_=BigInteger)),
)
"""Conditions for a workspace's runs with their last batch in a time, for statements that are built once."""
_IS_LATEST = (_r.run_id == _s.run_id) & (_r.attempt == _s.attempt)


@dataclass(frozen=True)
class SelectedSources:
    """Sources, as a part of a statement that is read first.

    Attributes:
        cte: Run, source and rank of each.
        conditions: Conditions of `cte` for `sources`, and for `runs` if `run` is None.
        run: Their run; None if they may be of several.
        values: Values of the parameters of `cte` by name, if statements with it are built once; None otherwise.
    """

    cte: CTE
    conditions: tuple[ColumnElement[bool], ...]
    run: str | None = None
    values: Mapping[str, object] | None = field(default=None, compare=False)

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

    def select(self, *columns: Any) -> Select[Any]:
        """Columns of `sources`, by run and rank."""
        query = select(*columns).where(*self.conditions).order_by(_s.run_id, _s.rank)
        return query if self.run is not None else query.join(schema.runs, _IS_LATEST)

    def execute(
        self,
        connection: Connection,
        build: Callable[..., Select[Any]],
        *arguments: Hashable,
        yield_per: int | None = None,
        **values: Any,
    ) -> Result[*tuple[Any, ...]]:
        """Run the statement that `build` returns for these sources and the arguments.

        Args:
            connection: To the database.
            build: As for `sql.execute_built`.
            arguments: Arguments of `build` after the sources.
            yield_per: Rows that the driver buffers; all by default.
            values: Values of the statement's named parameters.
        """
        if self.values is not None:
            values |= self.values
            return execute_built(connection, build, self, *arguments, values=values, yield_per=yield_per)
        options = {"yield_per": yield_per} if yield_per else {}
        return connection.execute(build(self, *arguments), values, execution_options=options)


def sources_of_attempt(run: str, attempt: str) -> SelectedSources:
    """Sources of an attempt of a run."""
    conditions = (_s.run_id == run, _s.attempt == attempt)
    return SelectedSources(_read_first(select(*_SOURCE).where(*conditions)), conditions, run)


def sources_of_latest(conditions: Sequence[ColumnElement[bool]]) -> SelectedSources:
    """Sources of the latest attempts of the runs that meet the conditions."""
    sources = select(*_SOURCE).join(schema.runs, _IS_LATEST).where(*conditions)
    return SelectedSources(_read_first(sources), tuple(conditions))


@cache
def _sources_of_active() -> SelectedSources:
    return sources_of_latest(ACTIVE_RUNS)


def sources_of_active(workspace: str, since_ns: int, until_ns: int) -> SelectedSources:
    """Sources of the latest attempts of a workspace's runs with their last batch in that time."""
    values = {"workspace": workspace, "since_ns": since_ns, "until_ns": until_ns}
    return replace(_sources_of_active(), values=values)


def _read_first(sources: Select[Any]) -> CTE:
    """Read the sources first, then their rows by key. Otherwise SQLite looks up the source of every row."""
    return sources.cte("reporting").prefix_with("MATERIALIZED")
