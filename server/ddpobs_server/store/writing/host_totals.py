"""Totals of attempts by host: one small row each, from which fleets are reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import insert_many
from ddpobs_server.store.rows import HostTotal

_h, _a, _r = schema.host_totals.c, schema.attempts.c, schema.runs.c


def write(connection: Connection, run: str, totals: Sequence[HostTotal], now_ns: int) -> None:
    """Replace the totals of some attempts of a run. A comparison of hosts stays until a later one.

    Args:
        connection: In a transaction.
        run: Key of the run. A deleted run stays deleted.
        totals: All totals of these attempts; `began_ns` is read from the attempts themselves.
        now_ns: The collector's wall clock.
    """
    unchanged = schema.runs.update().where(_r.run_id == run).values(chunk_bytes=_r.chunk_bytes)
    if not connection.execute(unchanged).rowcount:  # The run's own row is locked first, as in ingest.
        return
    begins = connection.execute(select(_a.attempt, _a.first_seen_ns).where(_a.run_id == run))
    began_ns = {row.attempt: row.first_seen_ns for row in begins}
    of_attempts = (_h.run_id == run, _h.attempt.in_({total.attempt for total in totals}))
    stored = select(_h.attempt, _h.host, _h.excess_ratio).where(*of_attempts)
    compared = {(attempt, host): ratio for attempt, host, ratio in connection.execute(stored)}
    connection.execute(schema.host_totals.delete().where(*of_attempts))
    rows = [
        {
            "run_id": run,
            "attempt": total.attempt,
            "host": total.host,
            "made_ns": now_ns,
            "commits": total.commits,
            "began_ns": began_ns[total.attempt],
            "wall_ns": total.wall_ns,
            "ranks": total.ranks,
            "has_rank_zero": int(total.has_rank_zero),
            "torch": total.torch,
            "tags": _text(total.tags),
            "parts": _text(total.parts),
            "excess_ratio": compared.get((total.attempt, total.host))
            if total.excess_ratio is None
            else total.excess_ratio,
        }
        for total in totals
        if total.attempt in began_ns
    ]
    insert_many(connection, schema.host_totals, rows)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
