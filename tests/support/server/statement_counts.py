"""Checks from a statement's text that a cluster with tables distributed by `run_id` can run it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddpobs_server.store import schema
from sqlalchemy import Engine, event

_BACKGROUND = {"ddpobs-limits", "ddpobs-retention", "ddpobs-watch", "ddpobs-fleet"}
"""Threads of jobs that run by the clock, at any moment of a request."""
SPREAD = set(schema.metadata.tables) - {table.name for table in schema.REFERENCE_TABLES}
_READ = re.compile(r"\b(?:FROM|JOIN|UPDATE) (\w+)")
_SAME_RUN = re.compile(r"\b(\w+)\.run_id = (\w+)\.run_id")
_ONE_RUN = re.compile(r"\b(\w+)\.run_id = [%?]")


@contextmanager
def recorded(target: Any = Engine) -> Iterator[list[str]]:
    """The statements that an engine (default: any engine) runs within the block, without those of background jobs."""
    statements: list[str] = []

    def record(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if threading.current_thread().name not in _BACKGROUND:
            statements.append(" ".join(statement.split()))

    event.listen(target, "before_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(target, "before_cursor_execute", record)


def assert_spreads(statement: str) -> None:
    """Each table is read for one run or joined by run; in a join, aggregates and window functions group by run.

    If a table is read for one run, every other is too, so that a single node answers: the cluster chooses nodes before
    it reads rows, and does not follow a join.
    """
    if inserted := re.match(r"INSERT INTO (\w+) \((.*?)\)", statement):
        assert inserted[1] not in SPREAD or "run_id" in inserted[2].split(", "), statement
        return
    read = [table for table in _READ.findall(statement) if table in SPREAD]
    of_one_run = _ONE_RUN.findall(statement)
    tied = [*of_one_run, *(name for pair in _SAME_RUN.findall(statement) for name in pair)]
    for table in set(read) - {"runs"}:
        assert tied.count(table) >= read.count(table), f"{table} of all runs: {statement}"
    if of_one_run:
        for table in set(read):
            assert of_one_run.count(table) >= read.count(table), f"{table} by a join, not by the run: {statement}"
    if of_one_run or set(read) <= {"runs"}:
        return
    grouped = re.search(r"GROUP BY (.*?)(?: ORDER BY|$)", statement)
    groupings = [grouped[1]] if grouped else []
    assert groupings or not re.search(r"\b(sum|count|max|min)\(", statement), f"aggregated over runs: {statement}"
    for columns in [*groupings, *re.findall(r"PARTITION BY ([^)]*)", statement)]:
        assert re.search(r"\.run_id\b", columns), f"aggregated over runs: {statement}"
