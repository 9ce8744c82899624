"""Brings store and analysis together: what is asked of a run, cached until the run is written to again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis import clocks, stragglers, trace
from ddpobs_server.analysis.catalogue import CATALOGUE, Evidence
from ddpobs_server.analysis.findings import Finding, Missing, named, ordered
from ddpobs_server.analysis.joins import Joined, fallen_behind, join, mean_over_ranks
from ddpobs_server.analysis.stragglers import lateness_table
from ddpobs_server.cache import Cache
from ddpobs_server.problems import Problem
from ddpobs_server.store import Run, Source, Store, TooManyRowsError

_log = logging.getLogger(__name__)

_STEPS, _FEWEST_STEPS, _ROWS = 2048, 512, 500_000
"""A diagnosis looks at the latest steps: so many, or as many as make so many rows, but not fewer than the fewest."""
_MOST_ROWS = 1_000_000
"""Fewer even than these, where they have more rows."""
_PARTINGS = 16
"""Ranks whose step numbers have parted are read apart, in so many reads at most."""
_BUCKET_STEPS, _BUCKET_RANKS = 200, 8
"""The bucket at which a slow backward shows is sought in the latest steps of the slow rank and some others."""
_TRACE_STEPS, _TRACE_EVENTS = 50, 100_000
_EVENTS = {"steps": len(wire.PHASES), "spans": 1}
"""Most that a row of each kind makes in a trace."""
_CLOCK_ROWS = 500_000
"""Most that are read beyond what was asked for, to align clocks by."""
_NOISE_ROWS = 50_000
_CACHED = 1024
_PATIENCE_S = 1.0


class TooMany(ValueError):  # noqa: N818 - what is wrong with what was asked for
    """More steps are asked for than one answer holds; those until `fits_until` would fit."""

    def __init__(self, fits_until: int) -> None:
        super().__init__(f"one answer holds the steps until {fits_until}")
        self.fits_until = fits_until


@contextmanager
def one_answer() -> Iterator[None]:
    """Around reads of columns for an answer.

    Raises:
        Problem: 422, where a step that is asked for has more rows than are read at once.
    """
    try:
        yield
    except TooManyRowsError as error:
        raise Problem(422, "Too many rows", f"{error}; ask for fewer steps, or for one rank's where you may") from None


class Reports:
    """Answers about runs.

    Args:
        store: Where columns come from.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._diagnoses: Cache[dict[str, Any]] = Cache(_CACHED)
        self._later = ThreadPoolExecutor(1, "ddpobs-reports")
        self._asking = threading.Lock()
        self._under_way: dict[tuple[str, str], Future[None]] = {}

    def diagnostics(self, run: str, attempt: str) -> dict[str, Any]:
        """Findings, most severe first, and what could not be judged."""
        return self._diagnoses.get((run, attempt), self._store.commits(run), lambda: self._diagnose(run, attempt))

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

    @one_answer()
    def stragglers(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Own times of all ranks by step, who was last, and each rank's share and excess.

        Of the latest steps where none are named; else of as many from `first` on as one answer holds, and `next`
        is then the step with which the next one begins.
        """
        end = None
        if first is None and last is None:
            rank, steps = _keeping_up(*self._recent_steps(run, attempt, self._store.sources(run, attempt)))
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

    @one_answer()
    def mean_steps(
        self, run: str, attempt: str, first: int | None, last: int | None
    ) -> tuple[dict[str, wire.Ints], int | None]:
        """Wall time and phases by step, the mean over its ranks; and the next page's first step, or None."""
        end = self._store.page_end("steps", run, attempt, first=first, last=last, rows=_ROWS)
        _, steps = self._store.steps(run, attempt, None, first, last if end is None else end)
        return mean_over_ranks(steps), None if end is None else end + 1

    @one_answer()
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
            columns[f"aligned_{name}_ns"] = clocks.aligned(ranks, offsets, columns[f"{name}_ns"])
        return {name: values[wanted] for name, values in columns.items()}

    @one_answer()
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
                raise TooMany(cut)
            # The latest steps are wanted where the beginning was left open.
            begin, end = (end - (cut - begin), end) if first is None else (begin, cut)
        return trace.chrome_trace(*self._on_one_clock(run, attempt, begin, end))

    def _trace_end(self, run: str, attempt: str, first: int, last: int) -> int | None:
        """The last step until which a trace fits, None where all do; each kind of rows has its share of the events."""
        if first == last:
            return None
        rows = {kind: self._store.rows_held(kind, run, attempt, first, last) for kind in _EVENTS}
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
        if around := clocks.steps_missing(steps):
            begin, end = max(0, int(steps[1].step[0]) - around), int(steps[1].step[-1]) + around
            if sum(self._store.rows_held(kind, run, attempt, begin, end) for kind in _EVENTS) <= _CLOCK_ROWS:
                shared = self._read(run, attempt, begin, end)
        return steps, spans, clocks.offsets_ns(*shared)[0]

    def _read(
        self, run: str, attempt: str, first: int | None, last: int | None
    ) -> tuple[tuple[wire.Ints, wire.Steps], tuple[wire.Ints, wire.Spans]]:
        return self._store.steps(run, attempt, None, first, last), self._store.spans(run, attempt, None, first, last)

    def _diagnose(self, run: str, attempt: str) -> dict[str, Any]:
        sources = self._store.sources(run, attempt)
        settings = next((s.hello.settings for s in sources if s.hello), {})
        apart = _apart(sources, settings)
        missing = []
        try:
            rank, steps = self._recent_steps(run, attempt, sources)
            rank, steps = (rank, steps) if apart else _keeping_up(rank, steps)
        except TooManyRowsError as error:
            rank, steps = np.zeros(0, np.int64), wire.Steps.of(np.zeros((len(wire.Steps.names), 0), np.int64))
            missing.append(Missing("steps", str(error)))
        joined = join(rank, steps)
        unheard, behind = _absent(sources, joined.ranks)
        missing += _not_judged(unheard, behind, apart)
        evidence = Evidence(
            rank=rank,
            steps=steps,
            joined=joined,
            unused=self._store.latest_unused(run, attempt),
            settings=settings,
            emitted={s.rank: s.emitted for s in sources},
            dropped={s.rank: s.dropped for s in sources},
            # A gap may still be under way while the source lives.
            missing_batches={s.rank: s.missing_batches if s.goodbye else 0 for s in sources},
            events=self._store.first_events(run, attempt),
            ahead_ns={s.rank: s.anchor.wall_ns - s.last_seen_ns for s in sources},
            absent=sorted(unheard + behind),
            apart=apart,
        )
        hosts = {s.rank: s.hello.host for s in sources if s.hello}
        slow = Missing("straggler", apart) if apart else stragglers.straggler_findings(joined, hosts)
        judged = [slow, *(find(evidence) for find in CATALOGUE)]
        findings = [f for found in judged if not isinstance(found, Missing) for f in found]
        try:
            findings = self._with_buckets(findings, run, attempt, (rank, steps), joined)
        except TooManyRowsError as error:
            missing.append(Missing("buckets", str(error)))
        return {
            "run": run,
            "attempt": attempt,
            "steps_seen": int(steps.step.max()) + 1 if len(steps.step) else 0,
            "findings": [finding.as_json() for finding in ordered(findings)],
            "missing": [str(found) for found in [*judged, *missing] if isinstance(found, Missing)],
        }

    def _with_buckets(
        self, findings: list[Finding], run: str, attempt: str, steps: tuple[wire.Ints, wire.Steps], joined: Joined
    ) -> list[Finding]:
        """Name the bucket at which a slow backward first shows, and its parameters; of the first few that are slow."""
        slow = [f for f in findings if f.code == "straggler" and f.phase == "backward"][:_BUCKET_RANKS]
        told = self._store.layouts(run, attempt) if slow else []
        layouts = {(layout.module, layout.revision): layout for layout in told}
        found = {}
        for finding in slow if layouts else []:
            rank, evidence = finding.ranks[0], finding.evidence
            ranks, spans = self._late_spans(finding, run, attempt, steps, joined)
            if len(ranks):
                began = stragglers.backward_began_ns(steps, (ranks, spans))
                excess_ns = min(evidence["excess_ns"], evidence["phase_excess_ns"]["backward"])
                late = stragglers.late_bucket(rank, ranks, spans, began, excess_ns)
                found[rank] = _with_bucket(finding, late, layouts)
        return [found.get(f.ranks[0], f) if f.code == "straggler" else f for f in findings]

    def _late_spans(
        self, finding: Finding, run: str, attempt: str, steps: tuple[wire.Ints, wire.Steps], joined: Joined
    ) -> tuple[wire.Ints, wire.Spans]:
        """Spans of a slow rank and some others, of the steps in which it was late among the latest."""
        slow, (of, rows) = finding.ranks[0], steps
        late = stragglers.late_collectives(joined.latest(_BUCKET_STEPS), slow, finding.steps[0])
        wanted = np.isin(of, _beside(slow, joined.ranks)) & np.isin(rows.collective, late)
        of, number = of[wanted], rows.step[wanted]
        together: dict[tuple[int, int], list[int]] = {}  # With uneven inputs the ranks' step numbers part.
        for rank in np.unique(of).tolist():
            own = number[of == rank]
            together.setdefault((int(own.min()), int(own.max())), []).append(rank)
        read = [self._store.spans(run, attempt, ranks, *ends) for ends, ranks in together.items()]
        if not read:
            return of, wire.Spans.of(np.zeros((len(wire.Spans.names), 0), np.int64))
        ranks, spans = np.concatenate([part for part, _ in read]), wire.Spans.joined([part for _, part in read])
        width = int(joined.ranks.max()) + 1
        kept = np.isin(spans.step * width + ranks, number * width + of)
        return ranks[kept], spans.at(kept)

    def _noise_ns(self, run: str, attempt: str, last: int) -> int:
        """How far apart the ranks end one all-reduce on aligned clocks, by some of the latest spans."""
        first = max(last - _BUCKET_STEPS, 0)
        end = self._store.page_end("spans", run, attempt, first=first, last=last, rows=_NOISE_ROWS)
        upto = last if end is None else end
        steps = self._store.steps(run, attempt, None, first, upto)
        return clocks.offsets_ns(steps, self._store.spans(run, attempt, None, first, upto))[1]

    def _recent_steps(self, run: str, attempt: str, sources: list[Source]) -> tuple[wire.Ints, wire.Steps]:
        """Each rank's latest steps by its own numbers: with uneven inputs these part."""
        last = {one.rank: one.last_step for one in sorted(sources, key=lambda one: one.last_step)} or {0: 0}
        window = max(_FEWEST_STEPS, min(_STEPS, _ROWS // max(1, len(sources))))
        while window > 1 and (rows := self._rows_of(run, attempt, last, window)) > _MOST_ROWS:
            window = max(1, int(0.9 * window * _MOST_ROWS / rows))
        parts = _side_by_side(last, window)
        if len(parts) == 1:
            rank, steps = self._store.steps(run, attempt, None, *parts[0][1:])
        else:
            read = [self._store.steps(run, attempt, *part) for part in parts]
            rank, steps = np.concatenate([ranks for ranks, _ in read]), wire.Steps.joined([rows for _, rows in read])
            order = np.lexsort((rank, steps.step))
            rank, steps = rank[order], steps.at(order)
        ranks, place = np.unique(rank, return_inverse=True)
        begins = np.array([last.get(one, 0) - window for one in ranks.tolist()], np.int64)
        within = steps.step > begins[place]
        return (rank, steps) if within.all() else (rank[within], steps.at(within))

    def _rows_of(self, run: str, attempt: str, last: dict[int, int], window: int) -> int:
        """About how many rows that window has, as if each rank had as many in the same steps."""
        held = self._store.rows_held
        parts = _side_by_side(last, window)
        return sum(held("steps", run, attempt, first, final) * len(ranks) // len(last) for ranks, first, final in parts)

    def _last_step(self, run: str, attempt: str) -> int:
        return max((source.last_step for source in self._store.sources(run, attempt)), default=0)


def _with_bucket(
    finding: Finding, place: tuple[int, int, int] | None, layouts: dict[tuple[int, int], wire.Layout]
) -> Finding:
    """The finding with this bucket of a module's layout, where it is known."""
    layout = layouts.get(place[:2]) if place else None
    if place is None or layout is None or place[2] >= len(layout.buckets):
        return finding
    names = [parameter.name for parameter in layout.buckets[place[2]].parameters]
    evidence = finding.evidence | {"module": layout.module}
    return replace(finding, buckets=[place[2]], parameters=names[:50], evidence=evidence)


def _beside(slow: int, ranks: wire.Ints) -> list[int]:
    """A rank and others to compare it with, from all over the world."""
    others = ranks[ranks != slow]
    few = np.linspace(0, len(others) - 1, min(len(others), _BUCKET_RANKS - 1)).astype(np.int64)
    return [slow, *others[few].tolist()]


def _side_by_side(last: dict[int, int], window: int) -> list[tuple[list[int], int, int]]:
    """Ranks whose last steps lie close together, and the steps that hold the window of each; the latest first.

    Args:
        last: Each rank's last step, by its own numbers.
        window: How many steps of each rank are looked at.
    """
    parts: list[tuple[list[int], int, int]] = []
    for rank, step in sorted(last.items(), key=lambda item: -item[1]):
        if not parts or step < parts[-1][2] - window // 4:
            parts.append(([], 0, step))
        ranks, _, final = parts[-1]
        ranks.append(rank)
        parts[-1] = ranks, max(0, step - window + 1), final
    return parts[:_PARTINGS]


def _keeping_up(rank: wire.Ints, steps: wire.Steps) -> tuple[wire.Ints, wire.Steps]:
    """Without the ranks that fell silent: with them no late step could be compared."""
    rows = ~np.isin(rank, fallen_behind(rank, steps))
    return (rank, steps) if rows.all() else (rank[rows], steps.at(rows))


def _absent(sources: list[Source], compared: wire.Ints) -> tuple[list[int], list[int]]:
    """Ranks of the world of which nothing was heard, and those of which nothing was heard lately."""
    heard = {source.rank for source in sources}
    world = max((source.world_size for source in sources), default=0)
    return sorted(set(range(world)) - heard), sorted(heard - set(compared.tolist())) if len(compared) else []


def _apart(sources: list[Source], settings: dict[str, wire.Scalar]) -> str:
    """Why ranks do not wait for each other: the module's process group is a part of the world."""
    world, ranks = max((source.world_size for source in sources), default=0), settings.get("group_ranks")
    if type(ranks) is not int or not 0 < ranks < world:
        return ""
    return f"DDP over {ranks} of {world} ranks: ranks of different process groups do not wait for each other"


def _not_judged(unheard: list[int], behind: list[int], apart: str) -> list[Missing]:
    """What cannot be said without these ranks: the slow one may be among them."""
    missing = []
    if unheard:
        missing.append(Missing("straggler", f"nothing was heard of rank {named(unheard)}"))
    if behind:
        gone = f"nothing was heard lately of rank {named(behind)}: the steps told end far behind those of the others"
        missing.append(Missing("straggler", gone))
    if apart:
        missing.append(Missing("comm-bound", f"waiting cannot be told from moving: {apart}"))
    elif absent := sorted(unheard + behind):
        missing.append(Missing("comm-bound", f"waiting cannot be told from moving without rank {named(absent)}"))
    return missing
