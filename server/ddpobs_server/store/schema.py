"""The tables. `run_id` is first in their keys, so that the schema can be distributed by run.

Only `REFERENCE_TABLES` are not distributed.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, LargeBinary, MetaData, String, Table, Text

from ddpobs import wire

metadata = MetaData()

DEFAULT_WORKSPACE = "default"
"""Runs of this workspace are stored under their bare name, runs of others under `WORKSPACE/NAME`."""

ROLLUP_STEPS = 64
"""Steps in each window of `rollups`."""
STEP_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the step-duration histogram, in seconds. A last bin counts longer steps."""

_NARROW: dict[str, Any] = {"sqlite_with_rowid": False}
"""For tables with narrow rows: SQLite stores the rows in key order, without a second copy of the key in an index
(https://www.sqlite.org/withoutrowid.html)."""


def _key(name: str, kind: type[BigInteger | String | Integer]) -> Column[object]:
    return Column(name, kind(128) if kind is String else kind(), primary_key=True, autoincrement=False)


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, default=0)


def _sums(*names: str) -> list[Column[int]]:
    return [_count(name) for name in names]


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


def _source_table(name: str, *columns: Column[Any] | Index, **options: Any) -> Table:
    """A table with a key that begins with the run and the source."""
    return Table(name, metadata, _key("run_id", String), _key("source", String), *columns, **options)


def _batch_items(name: str, *columns: Column[Any] | Index) -> Table:
    """A table of items of batches, keyed by the batch and the item's position in it."""
    return _source_table(name, _key("seq", BigInteger), _key("position", Integer), *columns)


def _layout_table(name: str, *columns: Column[Any]) -> Table:
    """A table keyed by a source's module and the revision of its layout."""
    return _source_table(name, _key("module", Integer), _key("revision", BigInteger), *columns)


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
    Column("record_bytes", BigInteger, nullable=False, server_default="0"),
    Column("tags", Text),
    Column("note", Text),
    Column("search_text", Text, nullable=False, server_default=""),
    Index("ix_runs_workspace", "workspace", "last_seen_ns"),
)
"""`tags` is a JSON list. Tags and note are null until a person sets them: those of the training apply.

The module `run_labels` defines `search_text`.
"""
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
workspaces = Table(
    "workspaces",
    metadata,
    Column("workspace", String(32), primary_key=True),
    Column("limits", Text, nullable=False),
)
"""Limits of workspaces that differ from the settings, as JSON objects."""
attempts = Table(
    "attempts", metadata, _key("run_id", String), _key("attempt", String), _count("ordinal"), _count("first_seen_ns")
)
deleted_attempts = Table(
    "deleted_attempts", metadata, _key("run_id", String), _key("attempt", String), _count("deleted_ns")
)
"""Attempts of deleted runs. Batches of their processes are refused, as they would bring a run back in part."""
audit_log = Table(
    "audit_log",
    metadata,
    Column("entry_id", String(24), primary_key=True),
    _count("at_ns"),
    Column("workspace", String(32), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("identity", String(128), nullable=False),
    Column("token_id", String(16), nullable=False),
    Column("peer", String(255), nullable=False),
    Column("action", String(32), nullable=False),
    Column("subject", String(128), nullable=False),
    _text("detail"),
    Index("ix_audit_log_workspace", "workspace", "entry_id"),
)
"""Changes by people and tokens, as `AuditEntry` describes them. Ids begin with the time, so they sort by it."""
notifications = Table(
    "notifications",
    metadata,
    _key("run_id", String),
    _key("attempt", String),
    Column("code", String(64), primary_key=True),
    Column("severity", String(16), primary_key=True),
    *_sums("claimed_ns", "sent_ns"),
)
"""Findings that the webhook was sent, or that a collector has claimed to send: `sent_ns` is then 0."""
host_checks = Table(
    "host_checks",
    metadata,
    Column("workspace", String(32), primary_key=True),
    Column("host", String(256), primary_key=True),
    Column("device", String(16), primary_key=True),
    Column("ranks", Integer, primary_key=True, autoincrement=False),
    _count("made_ns"),
    _text("rates"),
)
"""Rates of a host in its latest checks with that device and that many ranks, as a JSON list of objects by measure."""
REFERENCE_TABLES = (tokens, workspaces, deleted_attempts, audit_log, host_checks)
"""Small tables that outlive runs. In a distributed schema every node has a full copy."""
sources = _source_table(
    "sources",
    Column("attempt", String(16), nullable=False),
    *_sums("rank", "world_size", "emitted", "dropped", "first_seen_ns", "last_seen_ns", "last_step_seen_ns"),
    *_sums("last_step", "wall_ns", "monotonic_ns"),
    Column("hello", Text),
    Column("pulse", Text),
    Column("goodbye", Boolean, nullable=False, default=False),
    Column("ended", String(16), nullable=False, default=""),
    _count("stuck_ns"),
    Column("account", Text),
    _count("ended_ns"),
    Column("stuck_pulse", Text),
    Index("ix_sources_rank", "run_id", "attempt", "rank"),
)
"""The module `endings` defines `ended`, `ended_ns`, `stuck_ns` and `stuck_pulse`."""
batches = _source_table(
    "batches",
    _key("seq", BigInteger),
    Column("digest", LargeBinary(32), nullable=False),
    *_sums("received_ns", "size_bytes"),
    *(Column(f"{end}_{name}", BigInteger) for name in ("step", "collective") for end in ("first", "last")),
    **_NARROW,
)
"""The module `sent_once` defines the first and last steps and collectives; null without any."""
chunks = _source_table(
    "chunks",
    _key("kind", String),
    _key("seq", BigInteger),
    *_sums("first_step", "last_step", "rows"),
    Column("payload", LargeBinary, nullable=False),
    Column("attempt", String(16), nullable=False),
    _count("rank"),
    Index("ix_chunks_steps", "run_id", "attempt", "kind", "last_step", "first_step"),
)
"""Spans have a chunk per batch. Steps and comms of all batches of a transaction share a chunk, under the first batch's
key, with a column of ranks; `rank` is then `wire.UNKNOWN`."""
layouts = _layout_table("layouts", _text("body"))
unused = _batch_items(
    "unused",
    _text("body"),
    Column("module", Integer, nullable=False),
    _count("names"),
    Index("ix_unused_sets", "run_id", "source", "module", "seq", "position", "names"),
)
"""`names` counts the parameters unused on the rank. The index holds all but the body, which may have 16 MB."""
events = _batch_items("events", Column("kind", String(128), nullable=False), _text("body"))
fingerprints = _batch_items(
    "fingerprints",
    Column("module", Integer, nullable=False),
    _count("synchronised"),
    Column("digest", LargeBinary(16), nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""The module `fingerprints` defines the form of `body` and `digest`, and how many rows of a source stay."""
rollups = _source_table(
    "rollups",
    _key("step_window", BigInteger),
    *_sums("steps", "wall_ns", *(f"{phase}_ns" for phase in wire.PHASES), "comm_ns", "samples"),
    *_sums("own_ns", "own_steps"),
    **_NARROW,
)
step_bins = Table(
    "step_bins",
    metadata,
    _key("run_id", String),
    _key("attempt", String),
    _key("level", Integer),
    _key("bin", BigInteger),
    _key("block", Integer),
    *_sums("rows", "stale", "columns"),
    Column("payload", LargeBinary, nullable=False),
)
"""The module `step_bins` defines levels, blocks and the form of `payload`."""
step_histogram = _source_table("step_histogram", _key("bound", Integer), _count("steps"), **_NARROW)
bucket_sums = _layout_table("bucket_sums", Column("sums", LargeBinary, nullable=False))
"""The module `bucket_sums` defines the packed form of `sums`."""
host_totals = Table(
    "host_totals",
    metadata,
    _key("run_id", String),
    _key("attempt", String),
    Column("host", String(256), primary_key=True),
    *_sums("made_ns", "commits", "began_ns", "wall_ns", "ranks", "has_rank_zero"),
    Column("torch", String(64), nullable=False),
    _text("tags"),
    _text("parts"),
    Column("excess_ratio", Double),
    **_NARROW,
)
"""`store.rows.HostTotal` describes the columns. A row is written after a diagnosis, and goes with its run."""
peer_totals = _source_table(
    "peer_totals",
    _key("rank", Integer),
    *_sums("steps", "delay_ns", "wait_ns", "moving_ns", *(f"straggler_{phase}" for phase in wire.OWN_PHASES)),
    **_NARROW,
)
