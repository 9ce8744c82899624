"""The tables of a report: ranks, attempts, unused parameters and settings, as the page of the run has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddpobs import wire
from ddpobs.shared.quantities import time_of_day
from ddpobs_server.analysis.finding import first_names
from ddpobs_server.reports.attempts import AttemptOutcome
from ddpobs_server.store import Source

_MAX_ROWS = 1024
_ENDS = {"terminated": "ended by SIGTERM"}
"""Words for an end, as in the page's table of ranks; the others are words themselves."""
_NOTHING = {"", "unknown", "–"}
"""Cells without a value; an imported file that lacks a fact makes a run that has `unknown`."""


@dataclass(frozen=True)
class ReportTable:
    """A table with its heading and the titles of its columns."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def report_tables(
    sources: Sequence[Source],
    attempts: Sequence[AttemptOutcome],
    unused: Sequence[tuple[int, wire.Unused]],
    settings: Mapping[str, str],
) -> list[ReportTable]:
    """Return the tables that have rows; attempts only if there are several, or one with a reason.

    Columns without a value are left out.
    """
    tables = [ReportTable("Ranks", ("rank", "host", "process", "device", "steps", "end", "dropped"), _ranks(sources))]
    if len(attempts) > 1 or any(attempt.reason for attempt in attempts):
        columns = ("attempt", "outcome", "reason", "steps", "began", "ended")
        tables.append(ReportTable("Attempts", columns, _attempts(attempts)))
    tables.append(ReportTable("Unused parameters", ("rank", "since step", "parameters"), _unused(unused)))
    known: list[tuple[str, ...]] = [each for each in settings.items() if each[1] not in _NOTHING]
    tables.append(ReportTable("Settings and versions", ("name", "value"), known))
    return [_filled(table) for table in tables if table.rows]


def _filled(table: ReportTable) -> ReportTable:
    """The table without the columns that have no value in any row."""
    kept = [index for index, cells in enumerate(zip(*table.rows, strict=True)) if not _NOTHING.issuperset(cells)]
    rows = [tuple(row[index] for index in kept) for row in table.rows]
    return replace(table, columns=tuple(table.columns[index] for index in kept), rows=rows)


def _ranks(sources: Sequence[Source]) -> list[tuple[str, ...]]:
    return [
        (
            str(source.rank),
            source.hello.host if source.hello else "",
            str(source.hello.pid) if source.hello and source.hello.pid else "",
            source.hello.device if source.hello else "",
            f"{source.last_step + 1:,}" if source.last_step_seen_ns else "0",
            _ENDS.get(source.ended, source.ended) or "–",
            f"{source.dropped:,}" if source.dropped else "–",
        )
        for source in sorted(sources, key=lambda source: source.rank)[:_MAX_ROWS]
    ]


def _attempts(attempts: Sequence[AttemptOutcome]) -> list[tuple[str, ...]]:
    return [
        (
            str(attempt.ordinal + 1),
            attempt.outcome,
            ("" if attempt.first_rank is None else f"rank {attempt.first_rank}: ") + attempt.reason,
            f"{attempt.steps:,}",
            *("–" if ns is None else time_of_day(ns) for ns in (attempt.began_ns, attempt.ended_ns)),
        )
        for attempt in attempts[-_MAX_ROWS:]
    ]


def _unused(unused: Sequence[tuple[int, wire.Unused]]) -> list[tuple[str, ...]]:
    latest = {(rank, record.module): (rank, record) for rank, record in unused}
    used = [(rank, record) for rank, record in latest.values() if record.locally][:_MAX_ROWS]
    return [(str(rank), f"{record.step:,}", first_names(record.locally)) for rank, record in used]
