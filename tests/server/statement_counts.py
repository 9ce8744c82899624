"""What a cluster that spreads the tables by `run_id` can answer, told from a statement's text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddpobs_server.store import schema
from sqlalchemy import Engine, event

SPREAD = set(schema.metadata.tables) - {"tokens"}
_READ = re.compile(r"\b(?:FROM|JOIN|UPDATE) (\w+)")
_SAME_RUN = re.compile(r"\b(\w+)\.run_id = (\w+)\.run_id")
_ONE_RUN = re.compile(r"\b(\w+)\.run_id = [%?]")


@contextmanager
def recorded(target: Any = Engine) -> Iterator[list[str]]:
    """The statements that an engine, or any, runs within the block."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(" ".join(statement.split()))

    event.listen(target, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(target, "before_cursor_execute", note)


def assert_spreads(statement: str) -> None:
    """Each table that is read is of one run, or joined by run; and then what is summed or numbered is so by run."""
    if inserted := re.match(r"INSERT INTO (\w+) \((.*?)\)", statement):
        assert inserted[1] not in SPREAD or "run_id" in inserted[2].split(", "), statement
        return
    read = [table for table in _READ.findall(statement) if table in SPREAD]
    of_one_run = _ONE_RUN.findall(statement)
    tied = [*of_one_run, *(name for pair in _SAME_RUN.findall(statement) for name in pair)]
    for table in set(read) - {"runs"}:
        assert tied.count(table) >= read.count(table), f"{table} of all runs: {statement}"
    if of_one_run or set(read) <= {"runs"}:
        return
    grouped = re.search(r"GROUP BY (.*?)(?: ORDER BY|$)", statement)
    by = [grouped[1]] if grouped else []
    assert by or not re.search(r"\b(sum|count|max|min)\(", statement), f"summed over runs: {statement}"
    for columns in [*by, *re.findall(r"PARTITION BY ([^)]*)", statement)]:
        assert re.search(r"\.run_id\b", columns), f"summed over runs: {statement}"
