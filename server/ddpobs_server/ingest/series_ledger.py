"""Counts the series that stored batches give `/metrics`, and refuses batches that would exceed a limit."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import attrgetter

from ddpobs import wire
from ddpobs_server.reports.run_state import LAST_SCRAPES_NS
from ddpobs_server.settings import Settings
from ddpobs_server.store import DEFAULT_WORKSPACE, Store, UnavailableError
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.workspace_limits import WorkspaceLimits

RANK_SERIES, BUCKET_SERIES, RUN_SERIES = 21, 4, 74
"""Series of a rank, of a bucket, and most series of a run besides: facts, histogram, findings."""
LIMITS = ("max_series", "max_run_series", "max_buckets")
_REVISIONS = 10
"""Buckets of all revisions of a run's layouts, relative to the allowed buckets of its modules."""
_MAX_RUNS = 100_000
_ENDED_S, _LOOK_S = LAST_SCRAPES_NS / 1e9, 10.0
"""Silence after which a run that is over has no series, and time between two looks for such runs."""
_LOOKED_UP = 1000
"""Runs that a statement looks up."""


@dataclass
class _Attempt:
    """Ranks and buckets with series of a run's attempt."""

    ranks: set[int]
    buckets: dict[tuple[int, int], int]
    """By module and revision."""

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


@dataclass
class _Run:
    """A run, of which `/metrics` shows the current attempt alone."""

    workspace: str
    current: str
    attempts: dict[str, _Attempt] = field(default_factory=dict)
    seen_s: float = 0.0
    looked_up_s: float = 0.0
    """When the store was asked whether it goes on."""
    is_confirmed: bool = True
    """Whether the store has the current attempt."""

    @property
    def shown(self) -> _Attempt | None:
        return self.attempts.get(self.current)

    @property
    def series(self) -> int:
        return self.shown.series if self.shown is not None else 0


class SeriesLedger:
    """Series of the runs that `/metrics` shows. `check`, `stored` and `forget` are used on the writer's thread alone.

    Args:
        settings: `max_run_series`, `max_buckets` and `quiet_after_s`.
        limits: `max_series` of each workspace.
        store: Holds the ranks and layouts of runs that this process has not seen yet.
    """

    def __init__(self, settings: Settings, limits: WorkspaceLimits, store: Store) -> None:
        self._settings, self._limits, self._store = settings, limits, store
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        """In the order of their latest batch."""
        self._totals: Counter[str] = Counter()
        self._looked_s = float("-inf")
        self._lock = threading.Lock()

    def series(self) -> dict[str, int]:
        """Series of each workspace with runs in `/metrics`."""
        self._drop_hidden()
        with self._lock:
            return {workspace: count for workspace, count in self._totals.items() if count}

    def used_ratio(self, limit: str) -> float:
        """Used part of one of `LIMITS` in the workspace or the active run that uses most of it."""
        if limit == "max_series":
            used = ((count, self._limits.of(workspace).max_series) for workspace, count in self.series().items())
            return max((count / max(1, most) for count, most in used), default=0.0)
        self._drop_hidden()
        with self._lock:
            active = [run.shown for run in self._runs.values() if run.shown is not None]
        used_by = attrgetter("series" if limit == "max_run_series" else "module_buckets")
        return float(max(map(used_by, active), default=0) / max(1, getattr(self._settings, limit)))

    def check(self, batch: wire.Batch) -> None:
        """Count the series of a batch that is about to be stored.

        Raises:
            Problem: 422 if the run would have too many series or buckets; 429 if the workspace would.
        """
        run = self._runs.get(batch.run)
        if run is None or batch.attempt not in run.attempts:
            run = self._load(batch.run, batch.attempt, run)
        run.seen_s = time.monotonic()
        attempt = run.attempts[batch.attempt]
        ranks = {batch.rank}.union(*(peers.rank.tolist() for peers in batch.peers))
        if ranks <= attempt.ranks and not batch.layouts and self._move_to_end(batch.run):
            return
        larger = _Attempt(attempt.ranks | ranks, dict(attempt.buckets))
        larger.buckets |= {(layout.module, layout.revision): len(layout.buckets) for layout in batch.layouts}
        self._check_run(larger)
        self._keep(batch.run, replace(run, attempts=run.attempts | {batch.attempt: larger}))

    def stored(self, batch: wire.Batch) -> None:
        """Count the attempt that the store shows, now that a batch is committed."""
        run = self._runs.get(batch.run)
        if run is None or (run.is_confirmed and batch.attempt == run.current):
            return
        try:  # A spooled batch of an older attempt does not take over, and a newer one may do so late.
            current = self._store.latest_attempt(batch.run) or run.current
        except UnavailableError:
            self._drop(batch.run)
        else:
            self._set(batch.run, replace(run, current=current, is_confirmed=True))

    def forget(self, batch: wire.Batch) -> None:
        """Count what the store has, because a batch was not stored."""
        if batch.run in self._runs:
            self._drop(batch.run)

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

    def _keep(self, key: str, run: _Run) -> None:
        """Keep a run in its new state if that is within its workspace's limit.

        Raises:
            Problem: 429 if it is not.
        """
        before, limit = self._runs.get(key), self._limits.of(run.workspace).max_series
        growth = run.series - (before.series if before is not None else 0)
        if growth > 0 and self._totals[run.workspace] + growth > limit:
            self._drop_hidden(but=key)
        if growth > 0 and self._totals[run.workspace] + growth > limit:
            detail = (
                f"the active runs of workspace {run.workspace} have {self._totals[run.workspace]} series, {limit} are "
                "allowed (DDPOBS_SERVER_MAX_SERIES, or `ddpobs-server workspace limits`); try again once other runs "
                "have ended"
            )
            raise Problem(429, "Too many series", detail, {"Retry-After": "60"})
        self._set(key, run)

    def _load(self, key: str, attempt: str, known: _Run | None) -> _Run:
        """The run with an attempt from the store; an attempt that is new there will be the current one."""
        ranks = self._store.attempt_ranks(key, attempt)
        outlines = self._store.layout_outlines(key, attempt) if ranks else []
        buckets = {(outline.module, outline.revision): len(outline.dtypes) for outline in outlines}
        current, is_confirmed = attempt, bool(ranks)
        if ranks and known is not None and not known.is_confirmed:
            current, is_confirmed = known.current, False
        elif ranks:
            current = self._store.latest_attempt(key) or attempt
        others = {} if known is None or known.shown is None else {known.current: known.shown}
        attempts = others | {attempt: _Attempt(ranks, buckets)}
        run = _Run(key.rpartition("/")[0] or DEFAULT_WORKSPACE, current, attempts, is_confirmed=is_confirmed)
        if ranks:
            self._set(key, run)
        return run

    def _set(self, key: str, run: _Run) -> None:
        with self._lock:
            before = self._runs.get(key)
            self._totals[run.workspace] += run.series - (before.series if before is not None else 0)
            self._runs[key] = run
            self._runs.move_to_end(key)
        if len(self._runs) > _MAX_RUNS:
            self._drop(next(iter(self._runs)))

    def _move_to_end(self, key: str) -> bool:
        """Note that a run is the latest to send; False if it is not counted."""
        with self._lock:
            if key not in self._runs:
                return False
            self._runs.move_to_end(key)
            return True

    def _drop_hidden(self, but: str = "") -> None:
        """Forget the runs that have left `/metrics`: those without a batch for long, or that are over."""
        now_s = time.monotonic()
        quiet_s = now_s - self._settings.quiet_after_s
        ended_s = max(quiet_s, now_s - _ENDED_S)
        with self._lock:
            if now_s - self._looked_s < _LOOK_S:
                return
            self._looked_s = now_s
            silent = dict(takewhile(lambda item: item[1].seen_s < ended_s, self._runs.items()))
        hidden = {key for key, run in silent.items() if run.seen_s < quiet_s}
        hidden |= self._over([key for key in silent.keys() - hidden if silent[key].looked_up_s < ended_s])
        for key, run in silent.items():
            run.looked_up_s = now_s
            if key in hidden and key != but and run.seen_s < ended_s:  # It may send again meanwhile.
                self._drop(key)

    def _over(self, runs: list[str]) -> set[str]:
        """Those of the runs whose sources have all ended; none while the database is away."""
        over = set(runs)
        for begin in range(0, len(runs), _LOOKED_UP):
            try:
                over -= self._store.going_on(runs[begin : begin + _LOOKED_UP])
            except UnavailableError:
                return set()
        return over

    def _drop(self, key: str) -> None:
        with self._lock:
            if (run := self._runs.pop(key, None)) is not None:
                self._totals[run.workspace] -= run.series
