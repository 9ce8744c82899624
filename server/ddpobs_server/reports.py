"""Brings store and analysis together: what is asked of a run, cached until the run is written to again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis import clocks, stragglers, trace
from ddpobs_server.analysis.catalogue import CATALOGUE, Evidence
from ddpobs_server.analysis.findings import Finding, Missing, ordered
from ddpobs_server.analysis.joins import Joined, join
from ddpobs_server.store import Source, Store

_ROWS = 1_000_000
"""Most step rows one diagnosis reads: it then looks at the latest steps."""
_BUCKET_STEPS = 200
_TRACE_STEPS = 50
_CACHED = 256


class Reports:
    """Answers about runs.

    Args:
        store: Where columns come from.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: OrderedDict[tuple[Any, ...], tuple[tuple[int, int], dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def diagnostics(self, run: str, attempt: str) -> dict[str, Any]:
        """Findings, most severe first, and what could not be judged."""
        return self._cached(("diagnostics", run, attempt), lambda: self._diagnose(run, attempt))

    def stragglers(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Own times of all ranks by step, who was last, and each rank's share and excess."""
        key = ("stragglers", run, attempt, first, last)
        return self._cached(key, lambda: self._stragglers(run, attempt, first, last))

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
        ranks, spans = self._store.spans(run, attempt, None, first, last)
        offsets, _ = clocks.offsets_ns(self._store.steps(run, attempt, None, first, last), (ranks, spans))
        wanted = np.ones(len(ranks), bool)
        if rank is not None:
            wanted &= ranks == rank
        if module is not None:
            wanted &= spans.module == module
        columns = {"rank": ranks} | {name: getattr(spans, name) for name in spans.__struct_fields__}
        for name in ("ready", "launched", "done"):
            columns[f"aligned_{name}_ns"] = clocks.aligned(ranks, offsets, columns[f"{name}_ns"])
        return {name: values[wanted] for name, values in columns.items()}

    def trace(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Chrome trace of the steps asked for; where an end is left open, of `_TRACE_STEPS`."""
        if first is None:
            end = last if last is not None else self._last_step(run, attempt)
            first, last = max(0, end - _TRACE_STEPS + 1), end
        elif last is None:
            last = first + _TRACE_STEPS - 1
        steps = self._store.steps(run, attempt, None, first, last)
        spans = self._store.spans(run, attempt, None, first, last)
        return trace.chrome_trace(steps, spans, clocks.offsets_ns(steps, spans)[0])

    def _diagnose(self, run: str, attempt: str) -> dict[str, Any]:
        sources = self._store.sources(run, attempt)
        rank, steps = self._recent_steps(run, attempt, sources)
        joined = join(rank, steps)
        evidence = Evidence(
            rank=rank,
            steps=steps,
            joined=joined,
            unused=self._store.unused(run, attempt),
            settings=next((s.hello.settings for s in sources if s.hello), {}),
            emitted={s.rank: s.emitted for s in sources},
            dropped={s.rank: s.dropped for s in sources},
            # A gap may still be under way while the source lives.
            missing_batches={s.rank: s.missing_batches if s.goodbye else 0 for s in sources},
            events=self._store.events(run, attempt),
            ahead_ns={s.rank: s.anchor.wall_ns - s.last_seen_ns for s in sources},
        )
        hosts = {s.rank: s.hello.host for s in sources if s.hello}
        judged = [stragglers.straggler_findings(joined, hosts), *(find(evidence) for find in CATALOGUE)]
        findings = [f for found in judged if not isinstance(found, Missing) for f in found]
        findings = [self._with_bucket(f, run, attempt) for f in findings]
        return {
            "run": run,
            "attempt": attempt,
            "steps_seen": int(steps.step.max()) + 1 if len(steps.step) else 0,
            "findings": [finding.as_json() for finding in ordered(findings)],
            "missing": [str(found) for found in [*judged, *_silent(sources)] if isinstance(found, Missing)],
        }

    def _with_bucket(self, finding: Finding, run: str, attempt: str) -> Finding:
        """Name the bucket at which a slow backward first shows, and its parameters."""
        if finding.code != "straggler" or finding.phase != "backward":
            return finding
        first = max(finding.steps[0], finding.steps[1] - _BUCKET_STEPS)
        ranks, spans = self._store.spans(run, attempt, None, first, finding.steps[1])
        layouts = self._store.layouts(run, attempt)
        if not len(ranks) or not layouts:
            return finding
        layout = layouts[-1]
        of_layout = (spans.module == layout.module) & (spans.revision == layout.revision)
        ranks = ranks[of_layout]
        spans = wire.Spans(**{name: getattr(spans, name)[of_layout] for name in spans.__struct_fields__})
        began = self._backward_began(run, attempt, first, finding.steps[1], (ranks, spans))
        bucket = stragglers.first_late_bucket(finding.ranks[0], ranks, spans, began)
        if bucket is None or bucket >= len(layout.buckets):
            return finding
        names = [parameter.name for parameter in layout.buckets[bucket].parameters]
        return replace(finding, buckets=[bucket], parameters=names[:50])

    def _backward_began(
        self, run: str, attempt: str, first: int, last: int, spans: tuple[wire.Ints, wire.Spans]
    ) -> dict[tuple[int, int], int]:
        """(step, rank) -> when backward began: the last readiness less the backward phase, of one micro-step."""
        rank, steps = self._store.steps(run, attempt, None, first, last)
        whole = steps.micro_steps == 1
        keys = zip(steps.step[whole].tolist(), rank[whole].tolist(), strict=True)
        backward = dict(zip(keys, steps.backward_ns[whole].tolist(), strict=True))
        ready: dict[tuple[int, int], int] = {}
        span_rank, columns = spans
        for step, r, at in zip(columns.step.tolist(), span_rank.tolist(), columns.ready_ns.tolist(), strict=True):
            ready[step, r] = max(ready.get((step, r), 0), at)
        return {key: at - backward[key] for key, at in ready.items() if key in backward}

    def _stragglers(self, run: str, attempt: str, first: int | None, last: int | None) -> dict[str, Any]:
        if first is None and last is None:
            rank, steps = self._recent_steps(run, attempt, self._store.sources(run, attempt))
        else:
            rank, steps = self._store.steps(run, attempt, None, first, last)
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
        }
        if len(joined) and len(joined.ranks) > 1:
            answer |= _lateness_json(joined)
            span_first = max(int(joined.step[-1]) - _BUCKET_STEPS, 0)
            spans = self._store.spans(run, attempt, None, span_first, int(joined.step[-1]))
            answer["noise_ns"] = clocks.offsets_ns((rank, steps), spans)[1]
        return answer

    def _recent_steps(self, run: str, attempt: str, sources: list[Source]) -> tuple[wire.Ints, wire.Steps]:
        last = max((source.last_step for source in sources), default=0)
        window = max(512, _ROWS // max(1, len(sources)))
        return self._store.steps(run, attempt, None, max(0, last - window + 1), last)

    def _last_step(self, run: str, attempt: str) -> int:
        return max((source.last_step for source in self._store.sources(run, attempt)), default=0)

    def _cached(self, key: tuple[Any, ...], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        commits = self._store.commits(key[1])
        with self._lock:
            found = self._cache.get(key)
        if found is not None and found[0] == commits:
            return found[1]
        made = make()
        with self._lock:
            self._cache[key] = (commits, made)
            self._cache.move_to_end(key)
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return made


def _silent(sources: list[Source]) -> list[Missing]:
    """Ranks of the world that have not reported: the slow one may be among them."""
    world = max((source.world_size for source in sources), default=0)
    silent = sorted(set(range(world)) - {source.rank for source in sources})
    shown = ", ".join(map(str, silent[:20])) + (", ..." if len(silent) > 20 else "")
    return [Missing("straggler", f"nothing was heard of rank {shown}")] if silent else []


def _lateness_json(joined: Joined) -> dict[str, Any]:
    late = stragglers.lateness(joined)
    medians = np.median(joined.phases_ns, axis=0)
    excess = medians - np.stack(
        [np.median(np.delete(medians, index, axis=0), axis=0) for index in range(len(joined.ranks))]
    )
    per_rank = [
        {
            "rank": rank,
            "last_share": round(float((late.last == index).mean()), 4),
            "late_share": round(float(late.late[:, index].mean()), 4),
            "delay_ns": round(float(np.where(late.last == index, late.delay_ns, 0.0).mean())),
            "own_ns": round(float(np.median(joined.own_ns[:, index]))),
            "excess_ns": {name: round(float(excess[index, place])) for place, name in enumerate(wire.OWN_PHASES)},
        }
        for index, rank in enumerate(joined.ranks.tolist())
    ]
    return {
        "delay_ns": late.delay_ns.astype(np.int64).tolist(),
        "last_rank": joined.ranks[late.last].tolist(),
        "per_rank": per_rank,
    }
