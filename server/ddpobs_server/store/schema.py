"""The tables. All but `tokens` carry `run_id` first in their key, so that the schema can be distributed by it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, LargeBinary, MetaData, String, Table, Text

from ddpobs import wire

metadata = MetaData()

DEFAULT_WORKSPACE = "default"
"""Its runs are kept under their bare name, those of others under `WORKSPACE/NAME`."""

ROLLUP_STEPS = 64
"""Steps in one window of `rollups`."""
STEP_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the step-duration histogram, in seconds; one more counts what is above."""

_BY_KEY: dict[str, Any] = {"sqlite_with_rowid": False}
"""Of tables with narrow rows: SQLite keeps these in the order of their key, not beside an index that holds it again
(https://www.sqlite.org/withoutrowid.html)."""


def _key(name: str, kind: type[BigInteger | String | Integer]) -> Column[object]:
    return Column(name, kind(128) if kind is String else kind(), primary_key=True, autoincrement=False)


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, default=0)


def _sums(*names: str) -> list[Column[int]]:
    return [_count(name) for name in names]


runs = Table(
    "runs",
    metadata,
    _key("run_id", String),
    Column("attempt", String(16), nullable=False),
    _count("created_ns"),
    Column("last_seen_ns", BigInteger, nullable=False, index=True),
    _count("commits"),
    Column("workspace", String(32), nullable=False),
    _count("chunk_bytes"),
    Index("ix_runs_workspace", "workspace", "last_seen_ns"),
)
tokens = Table(
    "tokens",
    metadata,
    Column("token_id", String(16), primary_key=True),
    Column("digest", LargeBinary(32), nullable=False),
    Column("name", String(128), nullable=False),
    Column("workspace", String(32), nullable=False),
    Column("scopes", String(64), nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("revoked_ns", BigInteger),
)
"""Small, and of no run: with a distributed schema every node has all of it."""
attempts = Table(
    "attempts", metadata, _key("run_id", String), _key("attempt", String), _count("ordinal"), _count("first_seen_ns")
)
sources = Table(
    "sources",
    metadata,
    _key("run_id", String),
    _key("source", String),
    Column("attempt", String(16), nullable=False),
    *_sums("rank", "world_size", "emitted", "dropped", "first_seen_ns", "last_seen_ns", "last_step_seen_ns"),
    *_sums("last_step", "wall_ns", "monotonic_ns"),
    Column("hello", Text),
    Column("pulse", Text),
    Column("goodbye", Boolean, nullable=False, default=False),
)
batches = Table(
    "batches",
    metadata,
    _key("run_id", String),
    _key("source", String),
    _key("seq", BigInteger),
    Column("digest", LargeBinary(32), nullable=False),
    *_sums("received_ns", "size_bytes"),
    **_BY_KEY,
)
chunks = Table(
    "chunks",
    metadata,
    _key("run_id", String),
    _key("source", String),
    _key("kind", String),
    _key("seq", BigInteger),
    *_sums("first_step", "last_step", "rows"),
    Column("payload", LargeBinary, nullable=False),
    Column("attempt", String(16), nullable=False),
    _count("rank"),
    Index("ix_chunks_steps", "run_id", "attempt", "kind", "last_step", "first_step"),
)
"""Spans are kept as they came, a chunk a batch. Steps and comms of all batches of a transaction share one, under the
first batch's key, with a column of ranks; `rank` is then `wire.UNKNOWN`."""
layouts = Table(
    "layouts",
    metadata,
    _key("run_id", String),
    _key("source", String),
    _key("module", Integer),
    _key("revision", BigInteger),
    Column("body", Text, nullable=False),
)
unused = Table(
    "unused",
    metadata,
    _key("run_id", String),
    _key("source", String),
    _key("seq", BigInteger),
    _key("position", Integer),
    Column("body", Text, nullable=False),
    Column("module", Integer, nullable=False),
    _count("names"),
)
"""`names` counts the parameters unused on the rank."""
events = Table(
    "events",
    metadata,
    _key("run_id", String),
    _key("source", String),
    _key("seq", BigInteger),
    _key("position", Integer),
    Column("kind", String(128), nullable=False),
    Column("body", Text, nullable=False),
)
rollups = Table(
    "rollups",
    metadata,
    _key("run_id", String),
    _key("source", String),
    _key("step_window", BigInteger),
    *_sums("steps", "wall_ns", *(f"{phase}_ns" for phase in wire.PHASES), "comm_ns", "samples"),
    *_sums("own_ns", "own_steps"),
    **_BY_KEY,
)
step_histogram = Table(
    "step_histogram",
    metadata,
    _key("run_id", String),
    _key("source", String),
    _key("bound", Integer),
    _count("steps"),
    **_BY_KEY,
)
bucket_sums = Table(
    "bucket_sums",
    metadata,
    _key("run_id", String),
    _key("source", String),
    _key("module", Integer),
    _key("revision", BigInteger),
    Column("sums", LargeBinary, nullable=False),
)
"""`buckets` knows what `sums` hold."""
peer_totals = Table(
    "peer_totals",
    metadata,
    _key("run_id", String),
    _key("source", String),
    _key("rank", Integer),
    *_sums("steps", "delay_ns", "wait_ns", *(f"straggler_{phase}" for phase in wire.OWN_PHASES)),
    **_BY_KEY,
)
