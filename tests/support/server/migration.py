"""Databases of earlier revisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from alembic import command
from alembic.config import Config
from ddpobs_server.store.database import migration
from sqlalchemy import Connection, create_engine, text

from ddpobs import wire
from tests.support.server.batches import ATTEMPT, source_of, spans, steps

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
WINDOW = (*(f"{phase}_ns" for phase in wire.PHASES), "comm_ns", "samples", "own_ns", "own_steps")


def at_revision(url: str, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(migration._MIGRATIONS))
    engine = create_engine(url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        _fill(connection, revision)
    engine.dispose()


def _fill(connection: Connection, revision: str) -> None:
    """Insert a run of two ranks, in the form of the versions at that revision."""
    workspace = {} if revision < "0003" else {"workspace": "default", "chunk_bytes": 1}
    insert(connection, "runs", run_id="old", attempt=ATTEMPT, created_ns=1, last_seen_ns=2, commits=2, **workspace)
    insert(connection, "attempts", run_id="old", attempt=ATTEMPT, ordinal=0, first_seen_ns=1)
    zeros = dict.fromkeys(("emitted", "dropped", "first_seen_ns", "last_seen_ns", "last_step_seen_ns", "wall_ns"), 0)
    for rank in range(2):
        key = {"run_id": "old", "source": source_of(rank)}
        source: dict[str, object] = {**zeros, "monotonic_ns": 0, "last_step": 9, "goodbye": True}
        if revision >= "0006":
            source |= {"ended": "finished", "stuck_ns": 0}
        if revision >= "0012":
            source |= {"ended_ns": 0}
        insert(connection, "sources", **key, attempt=ATTEMPT, rank=rank, world_size=2, **source)
        insert(connection, "batches", **key, seq=0, digest=bytes(32), received_ns=1, size_bytes=1)
        insert(connection, "step_histogram", **key, bound=3, steps=10)
        body = wire.pack_json(wire.Unused(step=1, module=rank, locally=["a\0"][:rank], globally=[])).decode()
        of_module = {} if revision < "0004" else {"module": rank, "names": rank}
        insert(connection, "unused", **key, seq=0, position=0, body=body, **of_module)
        insert(connection, "rollups", **key, step_window=0, steps=10, wall_ns=10**9, **dict.fromkeys(WINDOW, 5))
        moving = {"moving_ns": 2} if revision >= "0013" else {}
        counts = {f"straggler_{phase}": 1 for phase in wire.OWN_PHASES}
        insert(connection, "peer_totals", **key, rank=rank, steps=10, delay_ns=3, wait_ns=4, **moving, **counts)
        layout: dict[str, Any] = key | {"module": 0, "revision": 1}
        if revision >= "0005":
            sums = np.array([[0, 1], [10, 10], [10 + rank] * 2, [2**40] * 2, [0, 1]], "<f8")
            insert(connection, "bucket_sums", **layout, sums=sums.tobytes())
        else:
            for bucket in (1, 0):
                times = {"compute_ns": 10 + rank, "comm_ns": 2**40, "exposed_ns": bucket}
                insert(connection, "bucket_rollups", **layout, bucket=bucket, steps=10, **times)
    for chunk in _first_chunks() if revision == "0001" else _second_chunks():
        insert(connection, "chunks", run_id="old", seq=0, first_step=0, last_step=9, **chunk)


def _first_chunks() -> Iterator[dict[str, object]]:
    """A chunk per batch and kind."""
    for rank in range(2):
        for kind, record in (("steps", steps(0, 10)), ("spans", spans(0, 10))):
            payload = zstandard.compress(wire.pack(record))
            yield {"source": source_of(rank), "kind": kind, "rows": len(record.step), "payload": payload}


def _second_chunks() -> Iterator[dict[str, object]]:
    """A chunk of spans per batch, and a chunk of both ranks' steps: bytes that earlier versions wrote."""
    for rank in range(2):
        spans_of = {"rows": 20, "rank": rank, "payload": (GOLDEN / "chunk-0002-spans.zst").read_bytes()}
        yield {"source": source_of(rank), "kind": "spans", "attempt": ATTEMPT, **spans_of}
    merged = {"rows": 20, "rank": wire.UNKNOWN, "payload": (GOLDEN / "chunk-0002-steps.zst").read_bytes()}
    yield {"source": source_of(0), "kind": "steps", "attempt": ATTEMPT, **merged}


def insert(connection: Connection, table: str, **row: object) -> None:
    names = ", ".join(row)
    values = ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({values})"), row)
