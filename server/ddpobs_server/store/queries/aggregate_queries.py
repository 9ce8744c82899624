"""Sums and rows of many runs' sources, each read in a single statement, however many runs and ranks there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Connection, Select, Table, and_, bindparam, case, func, or_, select

from ddpobs import wire
from ddpobs.wire.facts import EndFacts, facts_of
from ddpobs_server.store import schema
from ddpobs_server.store.aggregate_rows import LastSeen, PeerTotals, Rollup
from ddpobs_server.store.database.sql import columns_by_run, float_sum, padded
from ddpobs_server.store.selected_sources import SelectedSources

_s = schema.sources.c
_EVENTS = 10_000
"""Maximum number of events in a diagnosis. A limit is needed because clients choose the kinds."""
_EVENT_BYTES = 8_000_000
"""Maximum bytes of events in a diagnosis: each may have 16,384 characters."""
ENDS = ("failed", "died", "terminated", "interrupted")
"""Kinds of events that are read first if there are too many."""
_REPEATED, _REPEATS = ("stuck", "not_reduced", "exchanged"), 64
"""Kinds of events of which a diagnosis reads the first of each source, and how many."""


def rollups(connection: Connection, sources: SelectedSources) -> list[tuple[str, Rollup]]:
    """(run, sums) by rank."""
    phases = [f"{phase}_ns" for phase in wire.PHASES]
    names = ("steps", "wall_ns", "comm_ns", "samples", "own_ns", "own_steps")
    result = []
    for run, rank, *row in sources.execute(connection, _sums, schema.rollups, "rank", *names, *phases):
        values = [int(value) for value in row]
        plain = dict(zip(names, values, strict=False))
        by_phase = dict(zip(wire.PHASES, values[len(names) :], strict=True))
        result.append((run, Rollup(rank=rank, phases_ns=by_phase, **plain)))
    return result


def peer_totals(connection: Connection, sources: SelectedSources) -> dict[str, PeerTotals]:
    """Straggler statistics of the ranks that they describe, by run."""
    rows = sources.execute(connection, _sums, schema.peer_totals, *PeerTotals._fields)
    return {run: PeerTotals(*columns) for run, columns in columns_by_run(rows)}


def histograms(connection: Connection, sources: SelectedSources) -> dict[str, list[int]]:
    """Steps of all ranks in each bin of `schema.STEP_BOUNDS_S` and above the last, not cumulated, by run."""
    counts: dict[str, list[int]] = {}
    for run, bound, steps in sources.execute(connection, _sums, schema.step_histogram, "bound", "steps"):
        counts.setdefault(run, [0] * (len(schema.STEP_BOUNDS_S) + 1))[bound] = int(steps)
    return counts


def last_seen(connection: Connection, sources: SelectedSources) -> tuple[dict[str, LastSeen], dict[str, int]]:
    """Progress of the ranks, and the lowest rank that sent a hello, by run."""
    seen, lowest = {}, {}
    for run, (*columns, greets) in columns_by_run(sources.execute(connection, _last_seen)):
        progress = LastSeen(*columns)
        if 1 in greets:
            lowest[run] = progress.rank[greets.index(1)]
        seen[run] = progress if len(set(progress.rank)) == len(progress.rank) else _of_ranks(progress)
    return seen, lowest


def _last_seen(sources: SelectedSources) -> Select[Any]:
    has_hello = case((_s.hello.is_not(None), 1), else_=0)
    return sources.select(_s.run_id, _s.rank, _s.last_step, _s.last_step_seen_ns, _s.dropped, has_hello)


def _of_ranks(seen: LastSeen) -> LastSeen:
    """The progress of ranks from that of their sources, which are sorted by rank."""
    rows = []
    for rank, group in groupby(zip(*seen, strict=True), itemgetter(0)):
        _, step, seen_ns, dropped = zip(*group, strict=True)
        rows.append((rank, max(step), max(seen_ns), sum(dropped)))
    return LastSeen(*zip(*rows, strict=True))


class _RunFacts(msgspec.Struct):
    """The part of a hello that metrics show. The rest is skipped."""

    backend: str
    device: str
    versions: dict[str, str]


def facts(
    connection: Connection, sources: SelectedSources, ranks: Mapping[str, int]
) -> dict[str, tuple[str, str, str]]:
    """Backend, device and version of torch by run, from the hello of the run's rank in `ranks`."""
    decode = msgspec.json.Decoder(_RunFacts).decode
    by_run = {}
    count, values = padded(((rank,) for rank in sorted({-1, *ranks.values()})), "rank")
    for run, rank, hello in sources.execute(connection, _hellos, count, yield_per=64, **values):
        if ranks.get(run) == rank:
            record = decode(hello)
            by_run[run] = (record.backend, record.device, record.versions.get("torch", ""))
    return by_run


def _hellos(sources: SelectedSources, count: int) -> Select[Any]:
    is_wanted = or_(*(_s.rank == bindparam(f"rank_{index}", type_=BigInteger) for index in range(count)))
    return sources.select(_s.run_id, _s.rank, _s.hello).where(is_wanted, _s.hello.is_not(None))


def events(connection: Connection, sources: SelectedSources) -> list[tuple[str, int, wire.Event]]:
    """(run, rank, event): the first of each source and kind, of some kinds a few, in the order of sending.

    The rank of an event `died` is the one that it reports.
    """
    c = schema.events.c
    numbered = (
        select(sources.c.run_id, sources.c.source, sources.c.rank, c.seq, c.position, c.kind, event_number())
        .join(*sources.joined(schema.events))
        .subquery()
    )
    n = numbered.c
    is_end = case((n.kind.in_(ENDS) | n.kind.startswith("died:"), 0), else_=1)
    same = [n[name] == c[name] for name in ("run_id", "source", "seq", "position")]
    query = select(n.run_id, n.rank, n.seq, n.position, c.body).join(schema.events, and_(*same))
    query = query.where(is_read(n.kind, n.number), sources.in_run(schema.events))
    query = query.order_by(is_end, n.number, n.run_id, n.rank, n.seq, n.position).limit(_EVENTS)
    rows = within_bytes(connection.execute(query.execution_options(yield_per=64)), _EVENT_BYTES)
    result = []
    for run, rank, *_, body in sorted(rows):
        event = msgspec.json.decode(body, type=wire.Event)
        result.append((run, rank_of(event, rank), event))
    return result


def within_bytes(rows: Iterable[Any], limit_bytes: int) -> Iterator[Any]:
    """The first rows whose texts, in the last column, fit together into a number of bytes."""
    remaining = limit_bytes
    for row in rows:
        remaining -= len(row[-1])
        if remaining < 0:
            return
        yield row


def rank_of(event: wire.Event, sender: int) -> int:
    """Rank that an event is about: the sender's, or the rank whose death it reports."""
    rank = facts_of(event, EndFacts).rank if event.kind == "died" else None
    return sender if rank is None else rank


def is_read(kind: Any, number: Any) -> Any:
    """SQL: whether a diagnosis reads an event of this kind and `event_number`."""
    return number <= case((kind.in_(_REPEATED), _REPEATS), else_=1)


def event_number() -> Any:
    """Number of an event among those of its source and kind, 1 for the first."""
    c = schema.events.c
    first = (c.seq, c.position)
    return func.row_number().over(partition_by=(c.run_id, c.source, c.kind), order_by=first).label("number")


def _sums(sources: SelectedSources, table: Table, key: str, *names: str) -> Select[Any]:
    """Sums of a table's columns by run and by a column of the table, or of the sources if the table has none."""
    keys = [sources.c.run_id, table.c[key] if key in table.c else sources.c[key]]
    return (
        select(*keys, *(float_sum(table.c[name]) for name in names))
        .join(*sources.joined(table))
        .group_by(*reversed(keys))  # SQLite sorts faster by a number than by a run.
        .order_by(*keys)
    )
