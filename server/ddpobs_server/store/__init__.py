"""The collector's database: compressed chunks of columns, and plain rows to filter and sort by.

Every query covers a single run, or joins and sums each of several runs by its `run_id`.
"""

from __future__ import annotations

from ddpobs_server.store.column_queries import TooManyRowsError
from ddpobs_server.store.database_errors import UnavailableError, UnusableError
from ddpobs_server.store.ingest import Arrival, Outcome, UnstorableBatchError
from ddpobs_server.store.rows import (
    Aggregates,
    Attempt,
    BucketRollup,
    LayoutOutline,
    PeerTotal,
    Rollup,
    Run,
    Source,
    Token,
    WorkspaceUsage,
)
from ddpobs_server.store.schema import DEFAULT_WORKSPACE
from ddpobs_server.store.store import Store

__all__ = [
    "DEFAULT_WORKSPACE",
    "Aggregates",
    "Arrival",
    "Attempt",
    "BucketRollup",
    "LayoutOutline",
    "Outcome",
    "PeerTotal",
    "Rollup",
    "Run",
    "Source",
    "Store",
    "Token",
    "TooManyRowsError",
    "UnavailableError",
    "UnstorableBatchError",
    "UnusableError",
    "WorkspaceUsage",
]
