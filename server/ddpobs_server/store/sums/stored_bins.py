"""Bins of steps that are kept with a run: a table of whole numbers for each bin, level, and block of ranks.

A bin of level 0 has `BIN_STEPS` steps, a bin of the next level four times as many. Block `OVER_RANKS` has a row over
all ranks; other blocks have the rows of 32 ranks. If one block has all ranks, its rows are in `OVER_RANKS` instead.

Bins outlive the columns that they were computed from. A batch whose steps are in a bin already marks that bin as stale,
in the batch's own transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import zstandard
from sqlalchemy import Connection, bindparam, literal_column, select

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import compiled, execute_one

BIN_STEPS, FACTOR, LEVELS = schema.ROLLUP_STEPS, 4, 8
BLOCK_RANKS, OVER_RANKS = 32, -1
_TOGETHER = 64
"""Maximum number of blocks that are unpacked together."""
_c = schema.step_bins.c


def width(level: int) -> int:
    """Steps of a bin."""
    return int(BIN_STEPS * FACTOR**level)


def step_bin_states(connection: Connection, run: str, attempt: str, level: int = 0) -> dict[int, tuple[bool, int]]:
    """Whether each bin of a level is stale, and its number of rows."""
    query = select(_c.bin, _c.stale, _c.rows).where(
        _c.run_id == run, _c.attempt == attempt, _c.level == level, _c.block == OVER_RANKS
    )
    return {number: (bool(stale), rows) for number, stale, rows in connection.execute(query)}


def step_bins(
    connection: Connection,
    run: str,
    attempt: str,
    level: int,
    numbers: tuple[int, int],
    *,
    blocks: Sequence[int] | None,
    columns: Sequence[int] | None = None,
) -> tuple[wire.Ints, wire.Ints]:
    """Columns of the bins from the first to the last of `numbers`; None for all columns, or all blocks.

    Returns:
        Bin of each row, and the table with a column for each row, sorted by bin and block.
    """
    conditions = [_c.run_id == run, _c.attempt == attempt, _c.level == level, _c.bin.between(*numbers)]
    if blocks is not None:
        conditions.append(_c.block.in_(blocks))
    query = select(_c.bin, _c.columns, _c.payload).where(*conditions, _c.rows > 0).order_by(_c.bin, _c.block)
    stored = connection.execute(query).all()
    if not stored:
        return np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    counts = [zstandard.frame_content_size(payload) // (8 * count) for _, count, payload in stored]
    # Earlier versions wrote fewer columns.
    height = max(count for _, count, _ in stored) if columns is None else len(columns)
    table = np.zeros((height, sum(counts)), np.dtype("<i8"))
    # A read of a whole run has ten thousand blocks: those of one shape are unpacked together, to their place at once.
    positions = table.view(np.uint8).reshape(*table.shape, 8)
    decompress, begin = zstandard.ZstdDecompressor().decompress, 0
    shapes = [(row // _TOGETHER, stored[row].columns, rows) for row, rows in enumerate(counts)]
    for (_, count, rows), group in groupby(range(len(stored)), key=shapes.__getitem__):
        blocks_read = [decompress(stored[row].payload) for row in group]
        planes = np.frombuffer(b"".join(blocks_read), np.uint8).reshape(len(blocks_read), 8, count, rows)
        planes = planes if columns is None else planes[:, :, columns]
        end = begin + len(planes) * rows
        place = positions[: planes.shape[2], begin:end]
        place.reshape(planes.shape[2], len(planes), rows, 8)[:] = planes.transpose(2, 0, 3, 1)
        begin = end
    return np.repeat([number for number, _, _ in stored], counts), table.astype(np.int64, copy=False)


def packed(number: int, block: int, rows: int, table: wire.Ints) -> dict[str, Any]:
    """Row of a bin: its number, block, number of steps' rows and table. Packing takes longer than writing."""
    payload = zstandard.compress(_planes(table), 3)
    return {"bin": number, "block": block, "rows": rows, "stale": 0, "columns": len(table), "payload": payload}


def write_step_bins(
    connection: Connection, run: str, attempt: str, level: int, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Replace bins, and mark those of the next level as stale that hold them.

    Args:
        connection: In a transaction.
        run: The run.
        attempt: Its attempt.
        level: Level of the bins.
        rows: As `packed` returns them.
    """
    runs = schema.runs.c
    # Lock the run's own row first, as ingest and a deletion do. A deleted run stays deleted.
    unchanged = schema.runs.update().where(runs.run_id == run).values(chunk_bytes=runs.chunk_bytes)
    if not connection.execute(unchanged).rowcount:
        return
    if not rows:
        return
    new = [{"run_id": run, "attempt": attempt, "level": level, **row} for row in rows]
    numbers, same = {row["bin"] for row in new}, (_c.run_id == run, _c.attempt == attempt)
    connection.execute(schema.step_bins.delete().where(*same, _c.level == level, _c.bin.in_(numbers)))
    connection.execute(schema.step_bins.insert(), new)
    parents = _c.bin.in_({number // FACTOR for number in numbers})
    connection.execute(schema.step_bins.update().where(*same, _c.level == level + 1, parents).values(stale=1))


def keep_step_bin(connection: Connection, run: str, attempt: str, number: int) -> None:
    """Mark a bin of level 0 as current: the columns that would make it anew are removed."""
    connection.execute(
        schema.step_bins.update()
        .where(_c.run_id == run, _c.attempt == attempt, _c.level == 0, _c.bin == number)
        .values(stale=0)
    )


def mark_stale(connection: Connection, steps: Iterable[tuple[str, str, wire.Ints]]) -> None:
    """Mark the bins as stale that hold some of these steps: (run, attempt, steps)."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for run, attempt, own in steps:
        numbers.setdefault((run, attempt), set()).update((own // BIN_STEPS).tolist())
    sql, order = compiled(_MARK_STALE, connection.dialect)
    for (run, attempt), bins in sorted(numbers.items()):
        for low, high in ranges(sorted(bins)):
            values = {"the_run": run, "the_attempt": attempt, "low": low, "high": high}
            execute_one(connection, sql, [values[name] for name in order])


def ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of consecutive numbers, which are in rising order."""
    for _, consecutive in groupby(enumerate(numbers), lambda place: place[1] - place[0]):
        own = [number for _, number in consecutive]
        yield own[0], own[-1]


def _planes(table: wire.Ints) -> bytes:
    """Bytes of a table by position: the high bytes vary less than the low bytes."""
    return np.moveaxis(np.ascontiguousarray(table).view(np.uint8).reshape(*table.shape, 8), 2, 0).tobytes()


_MARK_STALE = (
    schema.step_bins.update()
    .where(
        _c.run_id == bindparam("the_run"),
        _c.attempt == bindparam("the_attempt"),
        _c.level == literal_column("0"),
        _c.bin.between(bindparam("low"), bindparam("high")),
        _c.stale == literal_column("0"),
    )
    .values(stale=literal_column("1"))
)
