"""The store: the query modules behind a single class that opens their connections."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError

from ddpobs_server.store.aggregate_rows import Aggregates, LayoutOutline
from ddpobs_server.store.database import distribution, engine, migration
from ddpobs_server.store.database.database_errors import UnavailableError
from ddpobs_server.store.database.database_state import DatabaseState
from ddpobs_server.store.queries import (
    aggregate_queries,
    attempt_queries,
    audit_queries,
    column_queries,
    digest_queries,
    fleet_queries,
    layout_queries,
    notification_queries,
    run_labels,
    run_queries,
    time_queries,
    token_queries,
    workspace_queries,
)
from ddpobs_server.store.rows import ComparedHost, HostTotals, Run, RunVersion
from ddpobs_server.store.schema import DEFAULT_WORKSPACE
from ddpobs_server.store.selected_sources import (
    SelectedSources,
    sources_of_active,
    sources_of_attempt,
    sources_of_latest,
)
from ddpobs_server.store.sums import bucket_sums, stored_bins
from ddpobs_server.store.sums.phase_totals import PhaseTotals
from ddpobs_server.store.sums.unused_names import UnusedNames
from ddpobs_server.store.upkeep import compaction, health_queries, removal
from ddpobs_server.store.writing import deleted_attempts, fingerprints, host_checks, host_totals, ingest
from ddpobs_server.store.writing.ingest import Arrival, Outcome, UnstorableBatchError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PROBE_S = 10.0
"""Seconds after a commit without a further check that batches can be stored."""
_RUN_BUCKETS = 200_000
"""Maximum number of buckets of all layouts of a run whose sizes are read."""


def _reads(query: Callable[Concatenate[Connection, _P], _R]) -> Callable[Concatenate[Store, _P], _R]:
    """The query as a method that runs it on a connection."""

    @wraps(query)
    def method(store: Store, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with store._engine.connect() as connection:
            return query(connection, *args, **kwargs)

    return method


def _writes(query: Callable[Concatenate[Connection, _P], _R]) -> Callable[Concatenate[Store, _P], _R]:
    """The query as a method that runs it in a transaction and commits."""

    @wraps(query)
    def method(store: Store, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with store._engine.begin() as connection:
            return query(connection, *args, **kwargs)

    return method


def _maintains(task: Callable[Concatenate[Engine, _P], _R]) -> Callable[Concatenate[Store, _P], _R]:
    """The task, which opens connections and transactions itself, as a method."""

    @wraps(task)
    def method(store: Store, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return task(store._engine, *args, **kwargs)

    return method


class Store:
    """Accepts batches and returns columns and rows. Safe to use from several threads; writers take turns.

    Any method that uses the database raises `UnavailableError` while the database is unreachable or full, and works
    again afterwards.

    Args:
        url: SQLAlchemy URL of a SQLite or PostgreSQL database.
        keep_free_bytes: With less free space on a SQLite file's disk no batch is stored: removal needs space too.
        read_only: Whether to leave a SQLite file unchanged.
        prepare_threshold: Executions after which PostgreSQL prepares a statement; None for never, behind a pool that
            gives each transaction another connection.
    """

    def __init__(
        self, url: str, keep_free_bytes: int = 0, *, read_only: bool = False, prepare_threshold: int | None = 5
    ) -> None:
        self._engine = engine.engine(url, write_ahead=not read_only, prepare_threshold=prepare_threshold)
        self._state = DatabaseState(self._engine, None if read_only else self._file)
        self._keep_free_bytes, self._disk = keep_free_bytes, self.folder
        self._stored_at = float("-inf")
        self._outlines, self._unused_names = layout_queries.LayoutOutlines(), UnusedNames()
        self._phases: defaultdict[str, PhaseTotals] = defaultdict(PhaseTotals)

    @property
    def folder(self) -> Path | None:
        """Folder of a SQLite file; None for a server's database."""
        return self._file.parent if self._file is not None else None

    @property
    def _file(self) -> Path | None:
        url = self._engine.url
        return Path(url.database).resolve() if url.get_backend_name() == "sqlite" and url.database else None

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def ingest(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Store batches in a transaction. Returns the outcome of each batch after the commit.

        Raises:
            UnavailableError: Too little space is free, or the database is unreachable.
            LostDatabaseError: The database's file was removed or replaced, or is damaged.
            OtherSchemaError: Another version changed the schema.
            UnstorableBatchError: A batch can never be stored.
        """
        self._check_acceptance()
        try:
            with self._state.observed(), self._engine.begin() as connection:
                migration.wait_for_migration(connection)
                outcomes = ingest.write(connection, arrivals)
        except (DataError, OverflowError) as error:
            detail = f"a value is beyond the database's range: {str(error).partition(chr(10))[0]}"
            raise UnstorableBatchError(detail) from error
        self._state.check()  # The file may have been removed during the commit.
        self._stored_at = time.monotonic()
        return outcomes

    def check_health(self) -> None:
        """Check that a batch could be stored and would be found again. Nothing is changed.

        Raises:
            LostDatabaseError: The database's file was removed or replaced, or is damaged.
            UnavailableError: The database is unreachable or full, or another version changed its schema.
            SQLAlchemyError: Tables or rights are missing.
        """
        self._check_acceptance()
        with self._engine.connect() as connection:
            migration.check(connection)
        if time.monotonic() - self._stored_at < _PROBE_S:
            return  # The latest commit is a better proof, and a probe would wait for the writer.
        with self._state.observed(), self._engine.connect() as connection:
            health_queries.try_batch(connection)

    def _check_acceptance(self) -> None:
        """Check what every batch is refused for before it reaches the database.

        Raises:
            LostDatabaseError: The database's file was removed or replaced, or is damaged.
            UnavailableError: Too little space is free.
        """
        self._state.check()
        if self._disk is None:
            return
        try:
            free = shutil.disk_usage(self._disk).free
        except OSError:
            return  # The database itself shows whether it can be written.
        if free < self._keep_free_bytes:
            raise UnavailableError(f"{free} bytes are free, {self._keep_free_bytes} must stay free", full=True)

    def ready(self) -> bool:
        """Whether the database answers and accepts batches, from the files that were opened first."""
        self._check_acceptance()
        with self._engine.connect() as connection:
            return health_queries.answers(connection)

    def aggregates(
        self,
        since_ns: int,
        until_ns: int = 2**63 - 1,
        workspace: str = DEFAULT_WORKSPACE,
        known: Mapping[str, RunVersion] = MappingProxyType({}),
        *,
        only: Sequence[str] | None = None,
        without: Sequence[str] = (),
    ) -> Aggregates:
        """Data for the metrics of the runs with their last batch in that time, in few statements for all runs.

        Args:
            since_ns: Earliest time of a run's last batch.
            until_ns: Latest such time.
            workspace: Workspace of the runs.
            known: Version of each run that the caller has data of. Runs of that version are not read again.
            only: The only runs; None for all.
            without: Runs that are left out.
        """
        conditions = [*run_queries.active(workspace, since_ns, until_ns), *run_queries.without(without)]
        if only is not None:
            conditions += run_queries.named(only)
        with self._snapshot() as connection:
            if only is None and not without:
                runs = run_queries.active_runs(connection, workspace, since_ns, until_ns)
                sources = sources_of_active(workspace, since_ns, until_ns)
            else:
                runs = run_queries.where(connection, conditions)
                sources = sources_of_latest(conditions)
            changed = [run for run in runs if known.get(run.run) != run.version]
            if 2 * len(changed) < len(runs):
                sources = sources_of_latest(run_queries.named([run.run for run in changed]))
            outlines = self._outlines.read(connection, sources, _RUN_BUCKETS) if changed else []
            by_key = {(run, outline.module, outline.revision): outline for run, outline in outlines}
            return self._aggregates(connection, sources, (runs, changed), by_key, self._phases[workspace])

    def _aggregates(
        self,
        connection: Connection,
        sources: SelectedSources,
        runs_and_changed: tuple[list[Run], list[Run]],
        outlines: dict[tuple[str, int, int], LayoutOutline],
        phase_totals: PhaseTotals,
    ) -> Aggregates:
        runs, changed = runs_and_changed
        if not changed:
            return Aggregates(runs, frozenset(), {}, {}, {}, {}, [], {}, {}, {}, {})
        histograms = aggregate_queries.histograms(connection, sources)
        sizes = {key: outline.size_bytes for key, outline in outlines.items()}
        by_bucket, reduced_bytes = bucket_sums.read_named(connection, sources, sizes)
        steps = {run: sum(counts) for run, counts in histograms.items()}
        last_seen, with_hello = aggregate_queries.last_seen(connection, sources)
        return Aggregates(
            runs=runs,
            changed=frozenset(run.run for run in changed),
            phases=phase_totals.read(connection, sources, changed, steps=steps, last_seen=last_seen, active=runs),
            last_seen=last_seen,
            facts=aggregate_queries.facts(connection, sources, with_hello),
            histograms=histograms,
            buckets=by_bucket,
            outlines=outlines,
            reduced_bytes=reduced_bytes,
            peers=aggregate_queries.peer_totals(connection, sources),
            unused=self._unused_names.counts(connection, sources),
        )

    def active_runs(self, since_ns: int, until_ns: int, workspace: str) -> list[Run]:
        """A workspace's runs with their last batch in that time, newest first."""
        with self._engine.connect() as connection:
            return run_queries.active_runs(connection, workspace, since_ns, until_ns)

    def layout_outlines(self, run: str, attempt: str) -> list[LayoutOutline]:
        """An attempt's layouts without names, by module and revision."""
        with self._engine.connect() as connection:
            outlines = self._outlines.read(connection, sources_of_attempt(run, attempt), _RUN_BUCKETS)
        return [outline for _, outline in outlines]

    def fleet_totals(self, workspace: str, since_ns: int, max_runs: int) -> Iterator[HostTotals]:
        """Totals of runs by host, as `fleet_queries.fleet_totals` has them; the connection is open until the end."""
        with self._engine.connect() as connection:
            yield from fleet_queries.fleet_totals(connection, workspace, since_ns, max_runs)

    def compared_hosts(self, workspace: str, since_ns: int, until_ns: int) -> Iterator[ComparedHost]:
        """Hosts of ended runs, as `fleet_queries.compared_hosts` has them; the connection is open until the end."""
        with self._engine.connect() as connection:
            yield from fleet_queries.compared_hosts(connection, workspace, since_ns, until_ns)

    @contextmanager
    def _snapshot(self) -> Iterator[Connection]:
        """A connection that sees a single state of the database."""
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN")
                yield connection
            else:
                yield connection.execution_options(isolation_level="REPEATABLE READ")

    runs = _reads(run_queries.runs)
    run = _reads(run_queries.run)
    set_labels = _writes(run_labels.set_labels)
    step_parts = _reads(digest_queries.step_parts)
    hellos = _reads(digest_queries.hellos)
    version = _reads(run_queries.version)
    going_on = _reads(run_queries.going_on)
    urgent_runs = _reads(run_queries.urgent)
    count_runs = _reads(run_queries.count_runs)
    run_counts = _reads(run_queries.counts)
    silent_runs_share = _reads(run_queries.silent_runs_share)
    silent_bytes_share = _reads(run_queries.silent_bytes_share)
    has_runs = _reads(run_queries.has_runs)
    runs_by_workspace = _reads(run_queries.runs_by_workspace)
    most_sources = _reads(run_queries.most_sources)
    count_sources = _reads(run_queries.count_sources)

    attempts = _reads(attempt_queries.attempts)
    attempt_summaries = _reads(attempt_queries.attempt_summaries)
    attempt_times = _reads(time_queries.attempt_times)
    imported_steps = _reads(attempt_queries.imported_steps)
    end_events = _reads(attempt_queries.end_events)
    sources = _reads(attempt_queries.sources)
    sources_of_attempts = _reads(attempt_queries.sources_of_attempts)
    missing_batches = _reads(attempt_queries.missing_batches)
    has_gaps = _reads(attempt_queries.has_gaps)
    layouts = _reads(attempt_queries.layouts)
    unused = _reads(attempt_queries.unused)
    latest_unused = _reads(attempt_queries.latest_unused)
    first_events = _reads(attempt_queries.first_events)
    differing_fingerprints = _reads(fingerprints.differing)
    rollups = _reads(attempt_queries.rollups)
    bucket_rollups = _reads(attempt_queries.bucket_rollups)

    steps = _reads(column_queries.steps)
    spans = _reads(column_queries.spans)
    comms = _reads(column_queries.comms)
    readiness = _reads(column_queries.readiness)
    page_end = _reads(column_queries.page_end)
    bins_with_columns = _reads(column_queries.bins_with_columns)
    estimate_rows = _reads(column_queries.estimate_rows)

    read_step_bins = _reads(stored_bins.step_bins)
    step_bin_states = _reads(stored_bins.step_bin_states)
    runs_without_totals = _reads(fleet_queries.without_totals)
    write_host_totals = _writes(host_totals.write)
    add_host_check = _writes(host_checks.add)
    write_step_bins = _writes(stored_bins.write_step_bins)
    keep_step_bin = _writes(stored_bins.keep_step_bin)
    runs_with_columns = _reads(run_queries.with_columns)
    workspace_limits = _reads(workspace_queries.stored_limits)
    set_workspace_limits = _writes(workspace_queries.store_limits)
    workspace_usage = _reads(workspace_queries.usage)
    attempt_ranks = _reads(workspace_queries.attempt_ranks)
    latest_attempt = _reads(workspace_queries.latest_attempt)

    tokens = _reads(token_queries.tokens)
    add_token = _writes(token_queries.add_token)
    revoke_token = _writes(token_queries.revoke_token)

    audit_entries = _reads(audit_queries.entries)
    add_audit_entry = _writes(audit_queries.add_entry)
    prune_audit_log = _writes(audit_queries.prune)

    sent_notifications = _reads(notification_queries.sent)
    claim_notification = _writes(notification_queries.claim)
    release_notification = _writes(notification_queries.release)
    mark_notification_sent = _writes(notification_queries.mark_sent)

    migrate = _maintains(migration.migrate)
    revisions = _maintains(migration.revisions)
    earlier_revisions = staticmethod(migration.earlier_revisions)
    distribute = _maintains(distribution.distribute)
    is_distributed = _reads(distribution.is_distributed)
    broken_links = _reads(distribution.broken_links)
    distribution = staticmethod(distribution.statements)

    delete = _maintains(removal.delete)
    forget_deleted = _writes(deleted_attempts.forget)
    expire_chunks = _maintains(removal.expire_chunks)
    expire_runs = _maintains(removal.expire_runs)
    prune_unused_sets = _maintains(removal.prune_unused_sets)
    shrink = _maintains(removal.shrink)
    used_bytes = _maintains(removal.used_bytes)
    compact = _maintains(compaction.compact_active)

    now_ns = _reads(health_queries.now_ns)
    size_bytes = _reads(health_queries.size_bytes)
    try_write = _reads(health_queries.try_write)
    integrity_errors = _maintains(health_queries.integrity_errors)
