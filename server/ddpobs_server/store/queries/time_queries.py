"""When attempts began and ended, by their ranks' own clocks. The statements do not grow with the runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, case, func, select

from ddpobs import wire
from ddpobs.wire.endings import IMPORTED
from ddpobs_server.store import schema
from ddpobs_server.store.rows import AttemptTimes

_s = schema.sources.c
_decode_account = msgspec.json.Decoder(wire.Account).decode


def attempt_times(connection: Connection, runs: Sequence[str]) -> dict[str, dict[str, AttemptTimes]]:
    """Times of each run's attempts that have a source, by run and attempt."""
    # A clock that is ahead counts as the arrival.
    sent_ns = func.max(case((_s.wall_ns < _s.last_seen_ns, _s.wall_ns), else_=_s.last_seen_ns))
    recorded_ns = func.max(case((_s.ended == IMPORTED, _s.wall_ns)))
    columns = (_s.run_id, _s.attempt, func.min(_s.first_seen_ns), func.max(_s.last_seen_ns), sent_ns, recorded_ns)
    began = _began(connection, runs)
    times: dict[str, dict[str, AttemptTimes]] = {run: {} for run in runs}
    rows = connection.execute(_of(select(*columns), runs).group_by(_s.run_id, _s.attempt))
    for run, attempt, first_ns, last_ns, latest_ns, file_ns in rows:
        times[run][attempt] = AttemptTimes(
            first_seen_ns=int(first_ns),
            last_seen_ns=int(last_ns),
            began_ns=began.get((run, attempt)),
            latest_ns=int(latest_ns if file_ns is None else file_ns),
            imported=file_ns is not None,
        )
    return times


def _began(connection: Connection, runs: Sequence[str]) -> dict[tuple[str, str], int]:
    """Start of the process of each attempt's lowest rank that has sent an account, by run and attempt."""
    known = _s.account.is_not(None)
    lowest = _of(select(_s.run_id, _s.attempt, func.min(_s.rank).label("rank")).where(known), runs)
    ranks = lowest.group_by(_s.run_id, _s.attempt).subquery()
    same = (_s.run_id == ranks.c.run_id) & (_s.attempt == ranks.c.attempt) & (_s.rank == ranks.c.rank)
    query = select(_s.run_id, _s.attempt, _s.wall_ns - _s.monotonic_ns, _s.account).join(ranks, same).where(known)
    began: dict[tuple[str, str], int] = {}
    for run, attempt, offset_ns, body in connection.execute(query):
        account = _decode_account(body)
        start_ns = offset_ns + (account.imported_ns if account.started_ns is None else account.started_ns)
        began[run, attempt] = min(began.get((run, attempt), start_ns), start_ns)
    return began


def _of(query: Select[Any], runs: Sequence[str]) -> Select[Any]:
    return query.join(schema.runs, schema.runs.c.run_id == _s.run_id).where(_s.run_id.in_(runs))
