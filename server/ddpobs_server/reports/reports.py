"""Responses about runs: columns from the store, results from the analysis, cached until the run's next commit.

A diagnosis reads a bounded number of steps and spans, and is computed once for all simultaneous requests. `/metrics`
and the list of runs show the outline of the last one; `/metrics` starts a new one in the background if the run changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from ddpobs_server.reports.account_json import account_json
from ddpobs_server.reports.attempts import AttemptOutcome, attempt_outcomes
from ddpobs_server.reports.background import BackgroundDiagnoses
from ddpobs_server.reports.cache import Cache
from ddpobs_server.reports.compare import Side, compare_json
from ddpobs_server.reports.diagnosis import Diagnosis
from ddpobs_server.reports.digests import RunDigests
from ddpobs_server.reports.fleet import fleet_json
from ddpobs_server.reports.fleet_figures import WEEKS, FleetFigures
from ddpobs_server.reports.host_totals import UnwrittenTotals
from ddpobs_server.reports.outline import DiagnosisOutline
from ddpobs_server.reports.pipeline import pipeline_response
from ddpobs_server.reports.run_state import ReportVersion, is_recent, report_version, state_of_run
from ddpobs_server.reports.whatif import Modelled, Question, whatif_json
from ddpobs_server.settings import Settings
from ddpobs_server.store import Run, Store
from ddpobs_server.web.run_faults import RunFaults

_Responses = Cache[dict[str, Any]]
_Kept = TypeVar("_Kept")
_CACHED, _CACHED_PARTS, _CACHED_ACCOUNTS = 1024, 64, 64
_CACHED_MODELS = 8
"""Models of steps: each holds the own times of all ranks, 20 MB with 1,024."""
_OUTLINES = 20_000
"""Outlines of diagnoses, of about 2 kB: more than the runs of a scrape, or each scrape would diagnose them all anew."""
_PATIENCE_S = 1.0
"""Longest wait for the first diagnoses of runs."""


class Reports:
    """Responses about runs.

    Args:
        store: Source of the columns.
        settings: Limits of a run's state; default: the default settings.
        now_ns: The collector's wall clock.
        faults: Contains the errors of single runs.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        faults: RunFaults | None = None,
    ) -> None:
        self._store, self._settings, self._now_ns = store, settings or Settings.model_validate({}), now_ns
        self._diagnosis = Diagnosis(store, now_ns, self._settings)
        self.faults = faults or RunFaults()
        self.unwritten_totals = UnwrittenTotals()
        self.digests = RunDigests(store, self.faults)
        self.fleet_figures = FleetFigures(lambda workspace: self.fleet(workspace, WEEKS, now_ns(), None))
        self._diagnoses: _Responses = Cache(_CACHED)
        self._outlines: Cache[DiagnosisOutline] = Cache(_OUTLINES)
        self._parts: _Responses = Cache(_CACHED_PARTS)
        self._accounts: _Responses = Cache(_CACHED_ACCOUNTS)
        self._modelled: Cache[Modelled] = Cache(_CACHED_MODELS)
        self._pipelines: _Responses = Cache(_CACHED_PARTS)
        self._background = BackgroundDiagnoses(self.diagnostics, self.faults)
        self._comparisons: _Responses = Cache(_CACHED_PARTS)

    def diagnostics(self, run: str, attempt: str) -> dict[str, Any]:
        """Return the findings, most severe first, and the questions that could not be judged."""
        version = self._version(run)
        diagnosis = self._diagnoses.get((run, attempt), version, lambda: self._diagnose(run, attempt, version))
        self._outlines.get((run, attempt), version, lambda: DiagnosisOutline.of(diagnosis))
        return diagnosis

    def _diagnose(self, run: str, attempt: str, version: ReportVersion) -> dict[str, Any]:
        keep = partial(self.unwritten_totals.put, run, version)
        return self._diagnosis.diagnose(run, attempt, keep=keep)

    def diagnose_soon(self, attempts: Iterable[tuple[str, str]]) -> None:
        """Begin the diagnoses of attempts, each a run and an attempt, in the background."""
        self._background.begin(dict.fromkeys(attempts, False))

    def diagnostics_for_marks(self, run: str, attempt: str) -> dict[str, Any]:
        """Return the last diagnosis of a live run if it is of the last half minute, else that of `diagnostics`.

        A picture marks the findings that the page has just requested. Batches that arrived meanwhile would cost a
        second diagnosis, also while the first is computed.
        """
        recent = self._of_last_half_minute(self._diagnoses, run, attempt)
        return self.diagnostics(run, attempt) if recent is None else recent

    def _of_last_half_minute(self, cache: Cache[_Kept], run: str, attempt: str) -> _Kept | None:
        """Return what was computed of a live run in the last half minute, or is computed now; else None."""
        now, cached = self._version(run), cache.latest((run, attempt))
        if cached is not None and _is_recent(cached.version, now):
            return cached.response
        pending = (future for version, future in cache.pending((run, attempt)) if _is_recent(version, now))
        future = next(pending, None)
        return None if future is None else future.result()

    def diagnostics_between(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Return the findings about the steps `first` to `last`; None leaves that end open."""
        if first is None and last is None:
            return self.diagnostics(run, attempt)
        return self._cached(
            self._parts, run, f"{attempt} {first} {last}", lambda: self._diagnosis.diagnose(run, attempt, first, last)
        )

    def account(self, run: str, attempt: str) -> dict[str, Any]:
        """Return the account of a run's wall time over all attempts, with the ranks of one attempt."""
        price = self._settings.gpu_hour_price
        return self._cached(self._accounts, run, attempt, lambda: account_json(self._store, run, attempt, price))

    def fleet(self, workspace: str, weeks: int, now_ns: int, tag: str | None) -> dict[str, Any]:
        """Return the rank time of all runs of a workspace over the latest weeks; `tag` selects runs."""
        return fleet_json(self._store, workspace, weeks, now_ns, tag)

    def pipeline(self, run: str, attempt: str) -> dict[str, Any]:
        """Return the stages of an attempt's pipeline."""
        return self._cached(self._pipelines, run, attempt, lambda: pipeline_response(self._store, run, attempt))

    def whatif(self, run: str, attempt: str, questions: Sequence[Question]) -> dict[str, Any]:
        """Return the predicted steps of an attempt after some changes.

        The model of a live run is kept for half a minute: the answers at all places of a slider share it.
        """
        known = self._of_last_half_minute(self._modelled, run, attempt)
        if known is None or isinstance(known.fitted, str):  # With more steps there may be a model.
            make = partial(self._diagnosis.modelled, run, attempt)
            known = self._modelled.get((run, attempt), self._version(run), make)
        return {"run": run, "attempt": attempt, **whatif_json(known, questions)}

    def compare(self, a: tuple[str, str], b: tuple[str, str], limit: float) -> dict[str, Any]:
        """Compare two attempts, each a run and an attempt; `limit` is the share by which the second may be slower."""

        def make() -> dict[str, Any]:
            sides = [Side(*side, self.diagnostics(*side)) for side in (a, b)]
            return compare_json(self._store, sides[0], sides[1], limit)

        return self._comparisons.get((a, b, limit), (self._version(a[0]), self._version(b[0])), make)

    def _cached(self, cache: _Responses, run: str, part: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `make` returned about a part of a run since its last commit, else call it."""
        return cache.get((run, part), self._version(run), make)

    def _version(self, run: str) -> ReportVersion:
        return report_version(self._store.version(run), self._settings, self._now_ns())

    def last_diagnosis(self, run: Run) -> tuple[DiagnosisOutline | None, bool]:
        """Return the outline of the latest attempt's last diagnosis, and whether it is current.

        A diagnosis is current if nothing was committed since, and, while the run is neither over nor lost, no two
        seconds have passed.
        """
        cached = self._outlines.latest((run.run, run.attempt))
        if cached is None:
            return None, False
        return cached.response, cached.version == report_version(run.version, self._settings, self._now_ns())

    def attempts(self, run: Run) -> list[AttemptOutcome]:
        """Return how each attempt of a run went, oldest first."""
        state = state_of_run(run, self._settings, self._now_ns())
        hang = ""
        if state in ("hung", "failed", "interrupted"):
            findings = self.diagnostics(run.run, run.attempt)["findings"]
            part = "title" if state == "hung" else "verdict"
            hang = next((f[part] for f in findings if f["code"] == "hang" and f["severity"] == "critical"), "")
        return attempt_outcomes(self._store, run, state, hang)

    def recent_diagnostics(self, runs: list[Run]) -> list[DiagnosisOutline | None]:
        """Return the outline of each run's last diagnosis, and begin new ones of the runs that have changed.

        Failed and hung runs are the first of their workspace.
        Runs without a diagnosis are waited for, together for at most `_PATIENCE_S`; None if that was too short.
        """
        last = {(run.run, run.attempt): self.last_diagnosis(run) for run in runs}
        running = self._background.begin(
            {(run.run, run.attempt): self._is_urgent(run) for run in runs if not last[run.run, run.attempt][1]}
        )
        first_diagnoses = [running[key] for key, (known, _) in last.items() if known is None and key in running]
        wait(first_diagnoses, _PATIENCE_S)
        return [self.last_diagnosis(run)[0] for run in runs]

    def _is_urgent(self, run: Run) -> bool:
        return state_of_run(run, self._settings, self._now_ns()) in ("failed", "hung")

    def undisturbed(self) -> AbstractContextManager[None]:
        """Begin no diagnosis in the background during the block."""
        return self._background.undisturbed()

    def close(self) -> None:
        """Stop beginning diagnoses."""
        self._background.close()


def _is_recent(version: Hashable, now: ReportVersion) -> bool:
    return isinstance(version, ReportVersion) and is_recent(version, now)
