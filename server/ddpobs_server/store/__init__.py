"""The collector's database: compressed chunks of columns, and plain rows to filter and sort by.

Every query covers a single run, or joins and sums each of several runs by its `run_id`.
"""

from __future__ import annotations

from ddpobs_server.store.aggregate_rows import (
    Aggregates,
    BucketRollup,
    LastSeen,
    LayoutOutline,
    PeerTotals,
    PhaseSums,
    Rollup,
)
from ddpobs_server.store.database.database_errors import (
    LostDatabaseError,
    OtherSchemaError,
    UnavailableError,
    UnusableError,
)
from ddpobs_server.store.queries.column_queries import TooManyRowsError
from ddpobs_server.store.queries.notification_queries import NotificationKey
from ddpobs_server.store.queries.run_labels import labels_of, trained_labels
from ddpobs_server.store.rows import (
    Attempt,
    AttemptSummary,
    AttemptTimes,
    AuditAction,
    AuditEntry,
    CallerKind,
    ComparedHost,
    HostTotal,
    HostTotals,
    Run,
    RunVersion,
    Source,
    Token,
    WantedRuns,
    WorkspaceUsage,
)
from ddpobs_server.store.schema import DEFAULT_WORKSPACE
from ddpobs_server.store.store import Store
from ddpobs_server.store.writing.ingest import Arrival, DeletedRunError, Outcome, UnstorableBatchError

__all__ = [
    "DEFAULT_WORKSPACE",
    "Aggregates",
    "Arrival",
    "Attempt",
    "AttemptSummary",
    "AttemptTimes",
    "AuditAction",
    "AuditEntry",
    "BucketRollup",
    "CallerKind",
    "ComparedHost",
    "DeletedRunError",
    "HostTotal",
    "HostTotals",
    "LastSeen",
    "LayoutOutline",
    "LostDatabaseError",
    "NotificationKey",
    "OtherSchemaError",
    "Outcome",
    "PeerTotals",
    "PhaseSums",
    "Rollup",
    "Run",
    "RunVersion",
    "Source",
    "Store",
    "Token",
    "TooManyRowsError",
    "UnavailableError",
    "UnstorableBatchError",
    "UnusableError",
    "WantedRuns",
    "WorkspaceUsage",
    "labels_of",
    "trained_labels",
]
