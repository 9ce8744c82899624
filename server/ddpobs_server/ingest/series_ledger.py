"""Counts the series that stored batches give `/metrics`, and refuses batches that would exceed a limit."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from operator import attrgetter

from ddpobs import wire
from ddpobs_server.settings import Settings
from ddpobs_server.store import DEFAULT_WORKSPACE, Store
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.workspace_limits import WorkspaceLimits

RANK_SERIES, BUCKET_SERIES, RUN_SERIES = 21, 4, 74
"""Series of a rank, of a bucket, and most series of a run besides: facts, histogram, findings."""
LIMITS = ("max_series", "max_run_series", "max_buckets")
_REVISIONS = 10
"""Buckets of all revisions of a run's layouts, relative to the allowed buckets of its modules."""
_MAX_ATTEMPTS = 100_000


@dataclass
class _Attempt:
    """Ranks and buckets with series of a run's attempt."""

    workspace: str
    ranks: set[int]
    buckets: dict[tuple[int, int], int]
    """By module and revision."""
    seen_s: float = 0.0

    @property
    def module_buckets(self) -> int:
        """Buckets of all modules: revisions of a module share their series."""
        largest: dict[int, int] = {}
        for (module, _), count in self.buckets.items():
            largest[module] = max(count, largest.get(module, 0))
        return sum(largest.values())

    @property
    def series(self) -> int:
        return RUN_SERIES + RANK_SERIES * len(self.ranks) + BUCKET_SERIES * self.module_buckets


class SeriesLedger:
    """Series of the active runs. `check` is used on the writer's thread alone.

    Args:
        settings: `max_run_series`, `max_buckets` and `quiet_after_s`.
        limits: `max_series` of each workspace.
        store: Holds the ranks and layouts of runs that this process has not seen yet.
    """

    def __init__(self, settings: Settings, limits: WorkspaceLimits, store: Store) -> None:
        self._settings, self._limits, self._store = settings, limits, store
        self._attempts: OrderedDict[tuple[str, str], _Attempt] = OrderedDict()
        self._totals: Counter[str] = Counter()
        self._lock = threading.Lock()

    def series(self) -> dict[str, int]:
        """Series of each workspace with active runs."""
        with self._lock:
            return {workspace: count for workspace, count in self._totals.items() if count}

    def used_ratio(self, limit: str) -> float:
        """Used part of one of `LIMITS` in the workspace or the active run that uses most of it."""
        if limit == "max_series":
            used = ((count, self._limits.of(workspace).max_series) for workspace, count in self.series().items())
            return max((count / max(1, most) for count, most in used), default=0.0)
        since_s = time.monotonic() - self._settings.quiet_after_s
        with self._lock:
            active = [attempt for attempt in self._attempts.values() if attempt.seen_s > since_s]
        used_by = attrgetter("series" if limit == "max_run_series" else "module_buckets")
        return float(max(map(used_by, active), default=0) / max(1, getattr(self._settings, limit)))

    def check(self, batch: wire.Batch) -> None:
        """Count the series of a batch that is about to be stored.

        Raises:
            Problem: 422 if the run would have too many series or buckets; 429 if the workspace would.
        """
        key = (batch.run, batch.attempt)
        attempt = self._attempts.get(key) or self._load(key)
        attempt.seen_s = time.monotonic()
        self._attempts.move_to_end(key)
        ranks = {batch.rank}.union(*(peers.rank.tolist() for peers in batch.peers))
        if ranks <= attempt.ranks and not batch.layouts:
            return
        larger = _Attempt(attempt.workspace, attempt.ranks | ranks, dict(attempt.buckets), attempt.seen_s)
        larger.buckets |= {(layout.module, layout.revision): len(layout.buckets) for layout in batch.layouts}
        self._check_run(larger)
        self._check_workspace(attempt, larger)
        self._replace(key, larger)

    def _check_run(self, attempt: _Attempt) -> None:
        settings = self._settings
        for name, count, limit in (
            ("buckets of all modules", attempt.module_buckets, settings.max_buckets),
            ("buckets of all layouts", sum(attempt.buckets.values()), _REVISIONS * settings.max_buckets),
        ):
            if count > limit:
                detail = f"a run may have {limit} {name} (DDPOBS_SERVER_MAX_BUCKETS), got {count}"
                raise Problem(422, "Too many series", detail)
        if attempt.series > settings.max_run_series:
            detail = f"a run may have {settings.max_run_series} series (DDPOBS_SERVER_MAX_RUN_SERIES)"
            raise Problem(422, "Too many series", f"{detail}, got {attempt.series}")

    def _check_workspace(self, before: _Attempt, after: _Attempt) -> None:
        workspace = after.workspace
        limit = self._limits.of(workspace).max_series
        if self._totals[workspace] + after.series - before.series <= limit:
            return
        self._drop_quiet()
        if self._totals[workspace] + after.series - before.series > limit:
            detail = (
                f"the active runs of workspace {workspace} have {self._totals[workspace]} series, {limit} are allowed "
                "(DDPOBS_SERVER_MAX_SERIES, or `ddpobs-server workspace limits`); try again once other runs have ended"
            )
            raise Problem(429, "Too many series", detail, {"Retry-After": "60"})

    def _load(self, key: tuple[str, str]) -> _Attempt:
        run, attempt = key
        ranks = self._store.attempt_ranks(run, attempt)
        outlines = self._store.layout_outlines(run, attempt) if ranks else []
        buckets = {(outline.module, outline.revision): len(outline.dtypes) for outline in outlines}
        loaded = _Attempt(run.rpartition("/")[0] or DEFAULT_WORKSPACE, ranks, buckets)
        self._replace(key, loaded)
        if len(self._attempts) > _MAX_ATTEMPTS:
            self._drop(next(iter(self._attempts)))
        return loaded

    def _replace(self, key: tuple[str, str], attempt: _Attempt) -> None:
        with self._lock:
            before = self._attempts.get(key)
            self._totals[attempt.workspace] += attempt.series - (before.series if before else 0)
            self._attempts[key] = attempt

    def _drop_quiet(self) -> None:
        """Forget attempts that have left `/metrics`; they are in order of their last batch."""
        quiet_s = time.monotonic() - self._settings.quiet_after_s
        for key, attempt in list(self._attempts.items()):
            if attempt.seen_s > quiet_s:
                break
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        with self._lock:
            attempt = self._attempts.pop(key)
            self._totals[attempt.workspace] -= attempt.series
