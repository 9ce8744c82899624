"""Answers about runs: columns from the store, results from the analysis, cached until the run's next commit.

A diagnosis reads a bounded number of steps and spans, and is computed once for all simultaneous requests. `/metrics`
and the list of runs show the last diagnosis; `/metrics` starts a new one in the background if the run changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.lateness import lateness_table
from ddpobs_server.analysis.steps import clock_alignment
from ddpobs_server.analysis.steps.joined_steps import join, mean_over_ranks
from ddpobs_server.analysis.steps.pipeline import stages_of, within_stages
from ddpobs_server.analysis.steps.step_bins import SHOWN, StepBins
from ddpobs_server.analysis.trace import chrome_trace
from ddpobs_server.reports.account import account_json
from ddpobs_server.reports.attempts import AttemptOutcome, attempt_outcomes
from ddpobs_server.reports.background import BackgroundDiagnoses
from ddpobs_server.reports.cache import Cache
from ddpobs_server.reports.compare import Side, compare_json
from ddpobs_server.reports.diagnosis import Diagnosis
from ddpobs_server.reports.digests import RunDigests
from ddpobs_server.reports.pipeline import pipeline_answer
from ddpobs_server.reports.recent_steps import drop_silent_ranks, read_recent_steps
from ddpobs_server.reports.run_state import ReportVersion, is_recent, report_version, state_of_run
from ddpobs_server.reports.step_bins import AttemptBins, Shown, read_step_bins, unix_times
from ddpobs_server.settings import Settings
from ddpobs_server.store import Run, Store

_BIN_ROWS = 25_000
"""Approximate limit of rows of bins in an answer."""
_ROWS = 500_000
"""Approximate limit of step rows in an answer."""
_TRACE_STEPS, _TRACE_EVENTS = 50, 100_000
_CLOCK_ROWS = 500_000
"""Most rows that are read around the requested steps to align clocks."""
_NOISE_STEPS, _NOISE_ROWS = 200, 50_000
_CACHED, _CACHED_PARTS, _CACHED_ACCOUNTS = 1024, 64, 64
_PATIENCE_S = 1.0
"""Longest wait for the first diagnoses of runs."""


class TooManyStepsError(ValueError):
    """More steps are requested than fit into an answer; the steps up to `fits_until` would fit."""

    def __init__(self, fits_until: int) -> None:
        super().__init__(f"one answer holds the steps up to {fits_until}")
        self.fits_until = fits_until


class Reports:
    """Answers about runs.

    Args:
        store: Source of the columns.
        settings: Limits of a run's state; default: the default settings.
        now_ns: The collector's wall clock.
    """

    def __init__(
        self, store: Store, settings: Settings | None = None, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._store, self._settings, self._now_ns = store, settings or Settings.model_validate({}), now_ns
        self._diagnosis = Diagnosis(store, now_ns)
        self.digests = RunDigests(store)
        self._diagnoses: Cache[dict[str, Any]] = Cache(_CACHED)
        self._parts: Cache[dict[str, Any]] = Cache(_CACHED_PARTS)
        self._accounts: Cache[dict[str, Any]] = Cache(_CACHED_ACCOUNTS)
        self._pipelines: Cache[dict[str, Any]] = Cache(_CACHED_PARTS)
        self._background = BackgroundDiagnoses(self.diagnostics)
        self._comparisons: Cache[dict[str, Any]] = Cache(_CACHED_PARTS)

    def diagnostics(self, run: str, attempt: str) -> dict[str, Any]:
        """Return the findings, most severe first, and the questions that could not be judged."""
        version = report_version(self._store.version(run), self._settings, self._now_ns())
        return self._diagnoses.get((run, attempt), version, lambda: self._diagnosis.diagnose(run, attempt))

    def diagnostics_for_marks(self, run: str, attempt: str) -> dict[str, Any]:
        """Return the last diagnosis of a live run if it is of the last half minute, else that of `diagnostics`.

        A picture marks the findings that the page has just requested. Batches that arrived meanwhile would cost a
        second diagnosis.
        """
        cached = self._diagnoses.latest((run, attempt))
        now = report_version(self._store.version(run), self._settings, self._now_ns())
        if cached is not None and isinstance(cached.version, ReportVersion) and is_recent(cached.version, now):
            return cached.answer
        return self.diagnostics(run, attempt)

    def diagnostics_between(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Return the findings about the steps `first` to `last`; None leaves that end open."""
        if first is None and last is None:
            return self.diagnostics(run, attempt)
        version = report_version(self._store.version(run), self._settings, self._now_ns())
        key = (run, f"{attempt} {first} {last}")
        return self._parts.get(key, version, lambda: self._diagnosis.diagnose(run, attempt, first, last))

    def account(self, run: str, attempt: str) -> dict[str, Any]:
        """Return the account of a run's wall time over all attempts, with the ranks of one attempt."""
        version = report_version(self._store.version(run), self._settings, self._now_ns())
        price = self._settings.gpu_hour_price
        return self._accounts.get((run, attempt), version, lambda: account_json(self._store, run, attempt, price))

    def pipeline(self, run: str, attempt: str) -> dict[str, Any]:
        """Return the stages of an attempt's pipeline."""
        version = report_version(self._store.version(run), self._settings, self._now_ns())
        return self._pipelines.get((run, attempt), version, lambda: pipeline_answer(self._store, run, attempt))

    def compare(self, a: tuple[str, str], b: tuple[str, str], limit: float) -> dict[str, Any]:
        """Compare two attempts, each a run and an attempt; `limit` is the share by which the second may be slower."""
        now_ns = self._now_ns()
        versions = tuple(report_version(self._store.version(run), self._settings, now_ns) for run, _ in (a, b))

        def answer() -> dict[str, Any]:
            sides = [Side(*side, self.diagnostics(*side)) for side in (a, b)]
            return compare_json(self._store, sides[0], sides[1], limit)

        return self._comparisons.get((a[0], f"{a} {b} {limit}"), versions, answer)

    def last_diagnosis(self, run: Run) -> tuple[dict[str, Any] | None, bool]:
        """Return the last diagnosis of the latest attempt, and whether it is current.

        A diagnosis is current if nothing was committed since, and, while the run is neither over nor lost, no two
        seconds have passed.
        """
        cached = self._diagnoses.latest((run.run, run.attempt))
        if cached is None:
            return None, False
        return cached.answer, cached.version == report_version(run.version, self._settings, self._now_ns())

    def attempts(self, run: Run) -> list[AttemptOutcome]:
        """Return how each attempt of a run went, oldest first."""
        state = state_of_run(run, self._settings, self._now_ns())
        hang = ""
        if state == "hung":
            findings = self.diagnostics(run.run, run.attempt)["findings"]
            hang = next((f["title"] for f in findings if f["code"] == "hang" and f["severity"] == "critical"), "")
        return attempt_outcomes(self._store, run, state, hang)

    def recent_diagnostics(self, runs: list[Run]) -> list[dict[str, Any] | None]:
        """Return the last diagnosis of each run, and begin new ones of the runs that have changed.

        Runs without a diagnosis are waited for, together for at most `_PATIENCE_S`; None if that was too short.
        """
        last = {(run.run, run.attempt): self.last_diagnosis(run) for run in runs}
        running = self._background.begin([key for key, (_, is_current) in last.items() if not is_current])
        first_diagnoses = [running[key] for key, (known, _) in last.items() if known is None and key in running]
        wait(first_diagnoses, _PATIENCE_S)
        return [self.last_diagnosis(run)[0] for run in runs]

    def undisturbed(self) -> AbstractContextManager[None]:
        """Begin no diagnosis in the background during the block."""
        return self._background.undisturbed()

    def close(self) -> None:
        """Stop beginning diagnoses."""
        self._background.close()

    def stragglers(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Return own times of all ranks by step, the last rank, and each rank's share and excess.

        In a pipeline these are compared within each stage.

        Without `first` and `last` the latest steps are used. Otherwise the answer holds as many steps from `first` on
        as fit, and `next` is the first step of the next answer.
        """
        end = None
        if first is None and last is None:
            sources = self._store.sources(run, attempt)
            rank, steps = drop_silent_ranks(*read_recent_steps(self._store, run, attempt, sources), sources)
        else:
            end = self._store.page_end("steps", run, attempt, first=first, last=last, rows=_ROWS)
            rank, steps = self._store.steps(run, attempt, None, first, last if end is None else end)
        joined = within_stages(join(rank, steps), stages_of(self._store.first_events(run, attempt)))
        answer: dict[str, Any] = {
            "run": run,
            "attempt": attempt,
            "steps": joined.step.tolist(),
            "ranks": joined.ranks.tolist(),
            "own_ns": joined.own_ns.astype(np.int64).tolist(),
            "excess_ns": np.zeros(joined.own_ns.shape, np.int64).tolist(),  # A single rank has no excess.
            "delay_ns": [],
            "last_rank": [],
            "noise_ns": 0,
            "per_rank": [],
            "next": None if end is None else end + 1,
        }
        if len(joined) and len(joined.ranks) > 1:
            answer |= lateness_table(joined)
            answer["noise_ns"] = self._noise_ns(run, attempt, int(joined.step[-1]))
        return answer

    def mean_steps(
        self, run: str, attempt: str, first: int | None, last: int | None
    ) -> tuple[dict[str, wire.Ints], int | None]:
        """Return wall time and phases by step, the mean over its ranks, and the next page's first step or None."""
        end = self._store.page_end("steps", run, attempt, first=first, last=last, rows=_ROWS)
        _, steps = self._store.steps(run, attempt, None, first, last if end is None else end)
        return mean_over_ranks(steps), None if end is None else end + 1

    def step_bins(
        self,
        run: str,
        attempt: str,
        bounds: tuple[int | None, int | None],
        points: int,
        rank: int | None,
        *,
        mean: bool,
    ) -> tuple[dict[str, wire.Ints], int | None]:
        """Return at most `points` bins of steps: each rank's, one rank's, or over all ranks.

        If ranks times bins do not fit into an answer, it has the first bins; the second result is the next step then.
        """
        sources = self._store.sources(run, attempt)
        highest = max((source.last_step for source in sources), default=0)
        first, last = bounds[0] or 0, highest if bounds[1] is None else min(bounds[1], highest)
        next_step = None
        fitting = points if mean or rank is not None else max(1, _BIN_ROWS // max(1, len(sources)))
        if fitting < points:
            end = first + -(-(last - first + 1) // points) * fitting - 1
            next_step, last, points = (end + 1 if end < last else None), min(end, last), fitting
        bins = StepBins.concat([])
        if first <= last:
            bins = read_step_bins(AttemptBins(self._store, run, attempt), (first, last), points, Shown(rank, mean))
        if next_step is not None and len(bins):
            next_step = int(bins.column("last").max()) + 1  # Stored bins may be wider than requested.
        bins = unix_times(bins, sources)
        return {name: bins.column(name) for name in SHOWN if name != "rank" or not mean}, next_step

    def aligned_spans(
        self,
        run: str,
        attempt: str,
        rank: int | None,
        first: int | None,
        last: int | None,
        *,
        module: int | None = None,
    ) -> dict[str, wire.Ints]:
        """Return columns of bucket spans, with ready, launched and done also on the lowest rank's clock."""
        _, (ranks, spans), offsets = self._on_one_clock(run, attempt, first, last)
        selected = np.ones(len(ranks), bool)
        if rank is not None:
            selected &= ranks == rank
        if module is not None:
            selected &= spans.module == module
        columns = {"rank": ranks} | spans.by_name()
        for name in ("ready", "launched", "done"):
            columns[f"aligned_{name}_ns"] = clock_alignment.align(ranks, offsets, columns[f"{name}_ns"])
        return {name: values[selected] for name, values in columns.items()}

    def trace(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Return a Chrome trace of the steps in [first, last].

        If either end is open, the trace holds `_TRACE_STEPS`, or as many as fit. About `_TRACE_EVENTS` fit; a single
        step is always whole.

        Raises:
            TooManyStepsError: Both ends are set, and the steps between them do not fit into one trace.
        """
        begin, end = first, last
        if begin is None:
            end = end if end is not None else self._last_step(run, attempt)
            begin = max(0, end - _TRACE_STEPS + 1)
        elif end is None:
            end = begin + _TRACE_STEPS - 1
        assert end is not None
        if (cut := self._trace_end(run, attempt, begin, end)) is not None:
            if first is not None and last is not None:
                raise TooManyStepsError(cut)
            # With an open start the latest steps are returned.
            begin, end = (end - (cut - begin), end) if first is None else (begin, cut)
        sources = self._store.sources(run, attempt)
        anchor = min(sources, key=lambda source: source.rank).anchor if sources else None
        wall_offset_ns = None if anchor is None else anchor.wall_ns - anchor.monotonic_ns
        layouts = self._store.layouts(run, attempt)[0]
        return chrome_trace.chrome_trace(*self._on_one_clock(run, attempt, begin, end), layouts, wall_offset_ns)

    def _trace_end(self, run: str, attempt: str, first: int, last: int) -> int | None:
        """Return the last step that fits into a trace, None if all do.

        Each kind of rows has its share of the events.
        """
        if first == last:
            return None
        rows = {kind: self._store.estimate_rows(kind, run, attempt, first, last) for kind in chrome_trace.EVENTS}
        events = sum(count * chrome_trace.EVENTS[kind] for kind, count in rows.items())
        if events > _TRACE_EVENTS:
            rows = {kind: count * _TRACE_EVENTS // events for kind, count in rows.items()}
        else:
            rows = dict.fromkeys(rows, _TRACE_EVENTS)
        cuts = [
            self._store.page_end(kind, run, attempt, first=first, last=last, rows=limit) for kind, limit in rows.items()
        ]
        return min((cut for cut in cuts if cut is not None), default=None)

    def _on_one_clock(
        self, run: str, attempt: str, first: int | None, last: int | None
    ) -> tuple[tuple[wire.Ints, wire.Steps], tuple[wire.Ints, wire.Spans], dict[int, int]]:
        """Return steps and spans of [first, last] with their ranks, and the offsets to the lowest rank's clock.

        If the ranks share too few collectives in these steps, the offsets are computed from the steps around as well.
        """
        steps, spans = self._read(run, attempt, first, last)
        shared = steps, spans
        if margin := clock_alignment.steps_to_add(steps):
            begin, end = max(0, int(steps[1].step[0]) - margin), int(steps[1].step[-1]) + margin
            if (
                sum(self._store.estimate_rows(kind, run, attempt, begin, end) for kind in chrome_trace.EVENTS)
                <= _CLOCK_ROWS
            ):
                shared = self._read(run, attempt, begin, end)
        return steps, spans, clock_alignment.offsets_ns(*shared)[0]

    def _read(
        self, run: str, attempt: str, first: int | None, last: int | None
    ) -> tuple[tuple[wire.Ints, wire.Steps], tuple[wire.Ints, wire.Spans]]:
        return self._store.steps(run, attempt, None, first, last), self._store.spans(run, attempt, None, first, last)

    def _noise_ns(self, run: str, attempt: str, last: int) -> int:
        """Return how far apart the ranks end one all-reduce on aligned clocks, measured on some of the latest spans."""
        first = max(last - _NOISE_STEPS, 0)
        end = self._store.page_end("spans", run, attempt, first=first, last=last, rows=_NOISE_ROWS)
        last = last if end is None else end
        steps = self._store.steps(run, attempt, None, first, last)
        return clock_alignment.offsets_ns(steps, self._store.spans(run, attempt, None, first, last))[1]

    def _last_step(self, run: str, attempt: str) -> int:
        return max((source.last_step for source in self._store.sources(run, attempt)), default=0)
