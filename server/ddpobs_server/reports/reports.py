"""Brings store and analysis together: what is asked of a run, cached until the run is written to again."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis import chrome_trace, clock_alignment
from ddpobs_server.analysis.findings.straggler import lateness_table
from ddpobs_server.analysis.joined_steps import join, mean_over_ranks
from ddpobs_server.reports.cache import Cache
from ddpobs_server.reports.diagnosis import Diagnosis, drop_silent_ranks
from ddpobs_server.store import Run, Store

_log = logging.getLogger(__name__)

_ROWS = 500_000
"""About so many rows of steps make an answer."""
_TRACE_STEPS, _TRACE_EVENTS = 50, 100_000
_EVENTS = {"steps": len(wire.PHASES), "spans": 1}
"""Most that a row of each kind makes in a trace."""
_CLOCK_ROWS = 500_000
"""Most that are read beyond what was asked for, to align clocks by."""
_NOISE_STEPS, _NOISE_ROWS = 200, 50_000
_CACHED = 1024
_PATIENCE_S = 1.0


class TooManyStepsError(ValueError):
    """More steps are asked for than one answer holds; those until `fits_until` would fit."""

    def __init__(self, fits_until: int) -> None:
        super().__init__(f"one answer holds the steps until {fits_until}")
        self.fits_until = fits_until


class Reports:
    """Answers about runs.

    Args:
        store: Where columns come from.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._diagnosis = store, Diagnosis(store)
        self._diagnoses: Cache[dict[str, Any]] = Cache(_CACHED)
        self._later = ThreadPoolExecutor(1, "ddpobs-reports")
        self._asking = threading.Lock()
        self._under_way: dict[tuple[str, str], Future[None]] = {}

    def diagnostics(self, run: str, attempt: str) -> dict[str, Any]:
        """Findings, most severe first, and what could not be judged."""
        return self._diagnoses.get((run, attempt), self._store.commits(run), lambda: self._diagnosis.of(run, attempt))

    def last_diagnosis(self, run: Run) -> tuple[dict[str, Any] | None, bool]:
        """What was found when its latest attempt was last looked at, and whether nothing came since."""
        known = self._diagnoses.known((run.run, run.attempt))
        return (None, False) if known is None else (known.answer, known.version == (run.created_ns, run.commits))

    def recent_diagnostics(self, runs: list[Run]) -> list[dict[str, Any] | None]:
        """The last diagnosis of each run; of those that have changed a new one is begun, for whoever asks next.

        Where there is none yet it is waited for, altogether for `_PATIENCE_S`; it is None where that was too short.
        """
        first = []
        with self._asking:
            self._under_way = {key: begun for key, begun in self._under_way.items() if not begun.done()}
            for run in runs:
                key = (run.run, run.attempt)
                known, current = self.last_diagnosis(run)
                if not current and key not in self._under_way:
                    self._under_way[key] = self._later.submit(self._look, key)
                if known is None and (begun := self._under_way.get(key)) is not None:
                    first.append(begun)
        wait(first, _PATIENCE_S)
        return [self.last_diagnosis(run)[0] for run in runs]

    def _look(self, key: tuple[str, str]) -> None:
        try:
            self.diagnostics(*key)
        except Exception:
            _log.exception("run %s was not diagnosed", key[0])

    def close(self) -> None:
        """Begin no more diagnoses."""
        self._later.shutdown(wait=False, cancel_futures=True)

    def stragglers(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Own times of all ranks by step, who was last, and each rank's share and excess.

        Of the latest steps where none are named; else of as many from `first` on as one answer holds, and `next`
        is then the step with which the next one begins.
        """
        end = None
        if first is None and last is None:
            sources = self._store.sources(run, attempt)
            rank, steps = drop_silent_ranks(*self._diagnosis.recent_steps(run, attempt, sources), sources)
        else:
            end = self._store.page_end("steps", run, attempt, first=first, last=last, rows=_ROWS)
            rank, steps = self._store.steps(run, attempt, None, first, last if end is None else end)
        joined = join(rank, steps)
        answer: dict[str, Any] = {
            "run": run,
            "attempt": attempt,
            "steps": joined.step.tolist(),
            "ranks": joined.ranks.tolist(),
            "own_ns": joined.own_ns.astype(np.int64).tolist(),
            "excess_ns": np.zeros(joined.own_ns.shape, np.int64).tolist(),  # Of a rank alone, which exceeds nobody.
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
        """Wall time and phases by step, the mean over its ranks; and the next page's first step, or None."""
        end = self._store.page_end("steps", run, attempt, first=first, last=last, rows=_ROWS)
        _, steps = self._store.steps(run, attempt, None, first, last if end is None else end)
        return mean_over_ranks(steps), None if end is None else end + 1

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
        """Columns of bucket spans, with ready, launched and done also on the lowest rank's clock."""
        _, (ranks, spans), offsets = self._on_one_clock(run, attempt, first, last)
        wanted = np.ones(len(ranks), bool)
        if rank is not None:
            wanted &= ranks == rank
        if module is not None:
            wanted &= spans.module == module
        columns = {"rank": ranks} | spans.by_name()
        for name in ("ready", "launched", "done"):
            columns[f"aligned_{name}_ns"] = clock_alignment.aligned(ranks, offsets, columns[f"{name}_ns"])
        return {name: values[wanted] for name, values in columns.items()}

    def trace(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Chrome trace of the steps asked for; where an end is left open, of `_TRACE_STEPS`, or as many as fit.

        About `_TRACE_EVENTS` fit; a single step is given whole.

        Raises:
            TooMany: Both ends are given, and more lies between than fits into one.
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
            # The latest steps are wanted where the beginning was left open.
            begin, end = (end - (cut - begin), end) if first is None else (begin, cut)
        return chrome_trace.chrome_trace(*self._on_one_clock(run, attempt, begin, end))

    def _trace_end(self, run: str, attempt: str, first: int, last: int) -> int | None:
        """The last step until which a trace fits, None where all do; each kind of rows has its share of the events."""
        if first == last:
            return None
        rows = {kind: self._store.estimate_rows(kind, run, attempt, first, last) for kind in _EVENTS}
        events = sum(held * _EVENTS[kind] for kind, held in rows.items())
        if events > _TRACE_EVENTS:
            rows = {kind: held * _TRACE_EVENTS // events for kind, held in rows.items()}
        else:
            rows = dict.fromkeys(rows, _TRACE_EVENTS)
        cuts = [
            self._store.page_end(kind, run, attempt, first=first, last=last, rows=most) for kind, most in rows.items()
        ]
        return min((cut for cut in cuts if cut is not None), default=None)

    def _on_one_clock(
        self, run: str, attempt: str, first: int | None, last: int | None
    ) -> tuple[tuple[wire.Ints, wire.Steps], tuple[wire.Ints, wire.Spans], dict[int, int]]:
        """Steps and spans of [first, last] with their ranks, and what puts these onto the lowest rank's clock.

        Where the ranks share too few collectives in there, the offsets are taken from the steps around as well.
        """
        steps, spans = self._read(run, attempt, first, last)
        shared = steps, spans
        if around := clock_alignment.steps_missing(steps):
            begin, end = max(0, int(steps[1].step[0]) - around), int(steps[1].step[-1]) + around
            if sum(self._store.estimate_rows(kind, run, attempt, begin, end) for kind in _EVENTS) <= _CLOCK_ROWS:
                shared = self._read(run, attempt, begin, end)
        return steps, spans, clock_alignment.offsets_ns(*shared)[0]

    def _read(
        self, run: str, attempt: str, first: int | None, last: int | None
    ) -> tuple[tuple[wire.Ints, wire.Steps], tuple[wire.Ints, wire.Spans]]:
        return self._store.steps(run, attempt, None, first, last), self._store.spans(run, attempt, None, first, last)

    def _noise_ns(self, run: str, attempt: str, last: int) -> int:
        """How far apart the ranks end one all-reduce on aligned clocks, by some of the latest spans."""
        first = max(last - _NOISE_STEPS, 0)
        end = self._store.page_end("spans", run, attempt, first=first, last=last, rows=_NOISE_ROWS)
        upto = last if end is None else end
        steps = self._store.steps(run, attempt, None, first, upto)
        return clock_alignment.offsets_ns(steps, self._store.spans(run, attempt, None, first, upto))[1]

    def _last_step(self, run: str, attempt: str) -> int:
        return max((source.last_step for source in self._store.sources(run, attempt)), default=0)
