"""Figures of a soak, and the conditions on them; the store is compared with the acknowledgements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from ddpobs_server.store import Store

from benchmarks.collector_faults import Outcome
from benchmarks.pairs import Ratio, ratio
from benchmarks.tenants import LOAD
from ddpobs import wire

MEMORY_BYTES = 1_500_000_000
"""Bound on the collector's peak memory under this load."""
P99_S, FLAT_RATIO = 2.0, 1.5
"""Bound on the latency outside of outages, and on the memory of the second half relative to the first."""
UNDER_WAY_MB, ANSWER_BYTES, MAX_RUNS = 256, 80_000_000, 5
"""Bounds on batches under way, on an answer (64 MB of runs, and the collector's own metrics), and on loud's runs."""
NEIGHBOUR = 1.10
"""Bound on the latency of `quiet` beside the load, as a multiple of that while the load works on another collector."""
ALONE, AGAIN, BESIDE, ELSEWHERE = "alone", "alone once more", "beside", "elsewhere"
OF_COLLECTOR = "beside over elsewhere"
"""The collector's own part: the load's clients share the processors with it in both turns."""
TURNS = (ALONE, BESIDE, AGAIN, ELSEWHERE)
_SETTLE_S = 2.0
FINISHED, FINISHED_BATCHES = "finished", 20
"""Name and batches of the run that is stored at the start."""
_SPANS = LOAD.steps * LOAD.buckets


@dataclass
class Record:
    """Figures of a soak.

    Attributes:
        acknowledged: Number of batches.
        latencies_s: (time, seconds) of each acknowledged batch.
        turns: (kind, begin, end) of each turn, in rounds of `TURNS`.
        memory: The collector's resident bytes, again and again.
        peak_bytes: Largest peak of any of its processes.
        under_way_bytes: Largest memory of batches under way.
        answer_bytes: Size of the largest answer.
    """

    acknowledged: int = 0
    latencies_s: list[tuple[float, float]] = field(default_factory=list)
    turns: list[tuple[str, float, float]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    under_way_bytes: float = 0
    answer_bytes: int = 0


def lost_and_doubled(url: str, run: str, first: int, last: int) -> tuple[int, int]:
    """Spans of the batches `first` to `last` (exclusive) that are not stored, and those that are stored twice."""
    store = Store(url)
    key = f"quiet/{run}"
    stored = store.run(key)
    lost = doubled = 0
    for begin in range(first, last, 100):
        end = min(begin + 100, last)
        spans = wire.Spans.from_table(np.zeros((len(wire.Spans.names), 0), np.int64))
        if stored is not None:
            _, spans = store.spans(key, stored.attempt, None, begin * LOAD.steps, end * LOAD.steps - 1)
        distinct = len(np.unique(np.stack([spans.step, spans.bucket]), axis=1).T)
        lost += (end - begin) * _SPANS - distinct
        doubled += len(spans) - distinct
    store.close()
    return lost, doubled


def neighbour(record: Record, calm: Sequence[tuple[float, float]]) -> dict[str, Ratio]:
    """Ratio of the medians of `quiet` in each kind of turn over those alone, by rounds."""
    medians: dict[str, list[float]] = {kind: [] for kind in TURNS}
    for first in range(0, len(record.turns) - len(TURNS) + 1, len(TURNS)):
        in_round: dict[str, list[float]] = {name: [] for name in medians}
        for kind, began, ended in record.turns[first : first + len(TURNS)]:
            in_round[kind] += [seconds for at, seconds in calm if began + _SETTLE_S <= at < ended]
        if all(in_round.values()):
            for kind, seconds in in_round.items():
                medians[kind].append(median(seconds))
    if not medians[ALONE]:
        return {}
    found = {kind: ratio([medians[kind]], [medians[ALONE]]) for kind in TURNS[1:]}
    return found | {OF_COLLECTOR: ratio([medians[BESIDE]], [medians[ELSEWHERE]])}


def figures(record: Record, outcome: Outcome, url: str, strange: Counter[str]) -> dict[str, Any]:
    """The conditions' figures."""
    timed = [
        (at, seconds)
        for at, seconds in record.latencies_s
        if not any(at <= end and at + seconds >= begin for begin, end in outcome.outages)
    ]
    calm = [seconds for _, seconds in timed]
    resident = [size for size in record.memory if size]
    middle = len(resident) // 2
    urls, ends = [*(removed for removed, _ in outcome.removed), url], [end for _, end in outcome.removed]
    parts = zip(urls, [0, *ends], [*ends, record.acknowledged], strict=True)
    counts = [lost_and_doubled(each, "quiet", first, last) for each, first, last in parts]
    counts += [lost_and_doubled(each, FINISHED, 0, FINISHED_BATCHES) for each in urls]
    store = Store(url)
    runs = store.count_runs("loud")
    store.close()
    return {
        "acknowledged_spans": record.acknowledged * _SPANS,
        "lost_spans": sum(lost for lost, _ in counts),
        "doubled_spans": sum(doubled for _, doubled in counts),
        "acknowledged_without_file": outcome.acknowledged_without_file,
        "calm_batches": len(calm),
        "p50_ms": float(np.median(calm or [0.0])) * 1e3,
        "p99_ms": float(np.percentile(calm or [0.0], 99)) * 1e3,
        "peak_mb": record.peak_bytes / 1e6,
        "first_half_mb": max(resident[:middle], default=0) / 1e6,
        "second_half_mb": max(resident[middle:], default=0) / 1e6,
        "under_way_mb": record.under_way_bytes / 1e6,
        "largest_answer_mb": record.answer_bytes / 1e6,
        "loud_runs": runs,
        "strange": dict(strange),
        "neighbour": {kind: vars(found) for kind, found in neighbour(record, timed).items()},
        "faults": outcome.counts,
    }


def broken_conditions(result: dict[str, Any], *, timed: bool) -> list[str]:
    """The conditions that do not hold; `timed`: those on latency and growth, which need minutes of a quiet machine."""
    checks = {
        f"{result['lost_spans']} acknowledged spans are not stored": result["lost_spans"],
        f"{result['doubled_spans']} spans are stored twice": result["doubled_spans"],
        "batches are acknowledged while the file is away": result["acknowledged_without_file"],
        f"the peak of the memory is {result['peak_mb']:.0f} MB": result["peak_mb"] * 1e6 > MEMORY_BYTES,
        "the memory grows": timed and result["second_half_mb"] > FLAT_RATIO * result["first_half_mb"],
        f"{result['under_way_mb']:.0f} MB of batches are under way": result["under_way_mb"] > UNDER_WAY_MB,
        f"an answer has {result['largest_answer_mb']:.0f} MB": result["largest_answer_mb"] * 1e6 > ANSWER_BYTES,
        f"the workspace has {result['loud_runs']} runs": result["loud_runs"] > MAX_RUNS,
        f"responses that no client should get: {result['strange']}": result["strange"],
        f"the neighbour's median: {result['neighbour']}": timed
        and result["neighbour"][OF_COLLECTOR]["middle"] > NEIGHBOUR,
        f"the 99th percentile of the latency is {result['p99_ms']:.0f} ms": timed and result["p99_ms"] > P99_S * 1e3,
    }
    return [text for text, is_broken in checks.items() if is_broken]
