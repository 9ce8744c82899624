"""The comparison of two runs: their latest steps and spans from the store, and the response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from ddpobs import wire
from ddpobs.shared.quantities import counted
from ddpobs.shared.words import Parts, bucket_title, parts_of
from ddpobs_server.analysis.comparison import compare
from ddpobs_server.analysis.comparison import facts as compare_facts
from ddpobs_server.analysis.comparison.compare import Change, RunTimes
from ddpobs_server.analysis.comparison.words import (
    change_title,
    change_words,
    fact_title,
    headline,
    limit_words,
    not_the_same_job,
)
from ddpobs_server.analysis.steps.joined_steps import Floats, mean_over_ranks
from ddpobs_server.analysis.steps.waiting import waiting_ns
from ddpobs_server.store import Source, Store, TooManyRowsError

_STEPS, _STEP_ROWS, _SPAN_ROWS = 4096, 400_000, 200_000
"""Maximum number of steps of a run that are compared, and about the most rows of steps and of spans that are read."""
Buckets = dict[tuple[int, int], str]
"""Name of a bucket by module and bucket."""


@dataclass(frozen=True)
class Side:
    """One attempt of the two that are compared, with its diagnosis."""

    run: str
    attempt: str
    diagnosis: Mapping[str, Any]


@dataclass(frozen=True)
class _Read:
    """Rows of one side."""

    sources: list[Source]
    layouts: list[wire.Layout]
    times: RunTimes


def compare_json(store: Store, a: Side, b: Side, limit: float) -> dict[str, Any]:
    """Return the comparison in the form of the REST API.

    Args:
        store: Source of the columns.
        a: The first attempt, to which changes are relative.
        b: The second attempt.
        limit: Share of the step's time by which the second run may be slower.
    """
    reads = [_read(store, side) for side in (a, b)]
    names_a, names_b = _bucket_names(reads[0].layouts, reads[1].layouts)
    times = [
        replace(read.times, **_bucket_times(store, side, read, names))
        for side, read, names in zip((a, b), reads, (names_a, names_b), strict=True)
    ]
    result = compare.compare(*times)
    facts = [_facts(read) for read in reads]
    differences = compare_facts.differences(*compare_facts.of_one_model(*facts))
    name_a, name_b = (side.run.rpartition("/")[2] for side in (a, b))
    step_ns, parts = (
        result.changes[0].a_ns,
        parts_of(bucket for layout in reads[1].layouts for bucket in layout.buckets),
    )
    return {
        "run": name_a,
        "attempt": a.attempt,
        "headline": headline(name_b, result),
        "not_the_same_job": not_the_same_job(name_a, name_b, compare_facts.differences(*facts)),
        "a": _side_json(a, 0, result),
        "b": _side_json(b, 1, result),
        "confidence": compare.CONFIDENCE,
        "changes": [_change_json(change, step_ns, change_title(change, result)) for change in result.changes],
        "buckets": {"heading": parts.heading, "compared": _compared(parts, len(names_b))},
        "too_few": result.too_few,
        "limit": {
            "ratio": limit,
            "exceeded": result.exceeded(limit),
            "decided": result.is_decided(limit),
            "words": limit_words(result, limit),
        },
        "disturbed": result.is_disturbed,
        "differences": [msgspec.structs.asdict(row) | {"title": fact_title(row.name)} for row in differences],
        "findings": compare_facts.findings_that_changed(a.diagnosis, b.diagnosis),
    }


def _compared(parts: Parts, count: int) -> str:
    return f"{counted(count, parts.row)} {'has' if count == 1 else 'have'} the same parameters in both runs"


def _side_json(side: Side, index: int, result: compare.Comparison) -> dict[str, Any]:
    return {
        "run": side.run.rpartition("/")[2],
        "attempt": side.attempt,
        "steps": result.steps[index],
        "long_steps": result.long_steps[index],
        "run_delay_ns": round(result.run_delay_ns[index]),
    }


def _change_json(change: Change, step_ns: float, title: str) -> dict[str, Any]:
    difference_ns = change.b_ns - change.a_ns
    times = {
        "a_ns": change.a_ns,
        "b_ns": change.b_ns,
        "change_ns": difference_ns,
        "low_ns": change.low_ns,
        "high_ns": change.high_ns,
        "smallest_ns": change.smallest_ns,
    }
    ratios = {
        "change_ratio": change.ratio(difference_ns),
        "low_ratio": change.ratio(change.low_ns),
        "high_ratio": change.ratio(change.high_ns),
        "smallest_ratio": change.ratio(change.smallest_ns),
        "step_share": change.a_ns / step_ns if step_ns else None,
    }
    return {
        "name": change.name,
        "title": title,
        "words": change_words(change),
        "kind": change.kind,
        "verdict": change.verdict,
        **{name: round(ns) for name, ns in times.items()},
        **{name: None if ratio is None else round(ratio, 5) for name, ratio in ratios.items()},
    }


def _read(store: Store, side: Side) -> _Read:
    sources = store.sources(side.run, side.attempt)
    return _Read(sources, store.layouts(side.run, side.attempt)[0], read_times(store, side.run, side.attempt, sources))


def read_times(store: Store, run: str, attempt: str, sources: list[Source]) -> RunTimes:
    """Return the times of the latest steps without buckets; none if even one step has too many rows."""
    last = max((source.last_step for source in sources), default=0)
    count = max(1, min(_STEPS, _STEP_ROWS // max(1, len(sources))))
    try:
        _, steps = store.steps(run, attempt, None, max(0, last - count + 1), last)
    except TooManyRowsError:
        _, steps = store.steps(run, attempt, None, last + 1, last + 1)
    world_size = max((source.world_size for source in sources), default=0)
    return run_times(steps, is_divided=len({source.rank for source in sources}) >= world_size)


def run_times(steps: wire.Steps, *, is_divided: bool = True) -> RunTimes:
    """Return the times of steps, which are ordered by step, without buckets.

    Args:
        steps: Columns of all ranks.
        is_divided: Whether waiting is known: waiting for a rank without telemetry looks like moving data.
    """
    means = mean_over_ranks(steps)
    begins = np.flatnonzero(np.diff(steps.step, prepend=-1))
    delay = np.maximum(steps.run_delay_ns, 0)
    delay_ns = np.maximum.reduceat(delay, begins) if len(begins) else delay
    phases = {phase: means[f"{phase}_ns"].astype(np.float64) for phase in wire.PHASES}
    if is_divided:
        waiting = np.add.reduceat(waiting_ns(steps), begins) / means["ranks"] if len(begins) else delay * 1.0
        phases |= {"waiting": waiting, "exposed_comm": phases["exposed_comm"] - waiting}
    return RunTimes(means["step"], means["wall_ns"].astype(np.float64), phases, delay_ns.astype(np.float64))


def _facts(read: _Read) -> dict[str, wire.Scalar]:
    hellos = [source.hello for source in read.sources if source.hello]
    facts: dict[str, wire.Scalar] = {
        "world_size": max((source.world_size for source in read.sources), default=0),
        "hosts": len({hello.host for hello in hellos}),
    }
    return facts | compare_facts.facts_of(hellos[0] if hellos else None, read.layouts)


def _bucket_names(a: list[wire.Layout], b: list[wire.Layout]) -> tuple[Buckets, Buckets]:
    """Return the names of the buckets with the same parameters in both runs, by the number in the first run."""
    layouts, pairs = compare_facts.latest(a), compare_facts.same_buckets(a, b)

    def name(module: int, bucket: int) -> str:
        parameters = [parameter.name for parameter in layouts[module].buckets[bucket].parameters]
        number = f"{module}.{bucket}" if len(layouts) > 1 else str(bucket)
        known = layouts[module].buckets[bucket]
        title = bucket_title(module, bucket, known) if known.unit else f"bucket {number}"
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        return f"{title}: {parameters[0]}{more}" if parameters else title

    return {key: name(*key) for key in pairs.values()}, {key: name(*of_a) for key, of_a in pairs.items()}


def _bucket_times(store: Store, side: Side, read: _Read, names: Buckets) -> dict[str, Any]:
    """Return the fields of `RunTimes` about buckets: of as many of the latest steps as fit into `_SPAN_ROWS`."""
    step = read.times.step
    if not names or not len(step):
        return {}
    first, last = int(step[0]), int(step[-1])
    rows = store.estimate_rows("spans", side.run, side.attempt, first, last)
    count = (last - first + 1) * _SPAN_ROWS // max(rows, _SPAN_ROWS)
    try:
        rank, spans = store.spans(side.run, side.attempt, None, last - max(1, count) + 1, last)
    except TooManyRowsError:
        return {}
    revisions = {module: layout.revision for module, layout in compare_facts.latest(read.layouts).items()}
    modules, module_index = np.unique(spans.module, return_inverse=True)
    is_latest = spans.revision == np.array([revisions.get(module, -1) for module in modules.tolist()])[module_index]
    rank, spans = rank[is_latest], spans.select(is_latest)
    compute = _since_previous(rank, spans)
    steps, step_index = np.unique(spans.step, return_inverse=True)
    by_name: dict[str, tuple[Floats, Floats]] = {}
    for name, rows_of in zip(names.values(), _rows_of(spans, list(names)), strict=True):
        index = step_index[rows_of]
        counts = np.bincount(index, minlength=len(steps))
        if (counts == 0).any():  # Not in every step: it has no series.
            continue
        comm = spans.done_ns[rows_of] - spans.launched_ns[rows_of]
        sums = (np.bincount(index, values, len(steps)) for values in (compute[rows_of], comm))
        by_name[name] = tuple(total / counts for total in sums)  # type: ignore[assignment]
    return {"bucket_step": steps, "buckets_ns": by_name}


def _rows_of(spans: wire.Spans, buckets: list[tuple[int, int]]) -> Iterator[wire.Ints]:
    """Yield the rows of each (module, bucket) in order; all rows are searched once, however many buckets there are."""
    wanted = np.array(buckets, np.int64).reshape(-1, 2)
    width = 1 + max(int(spans.bucket.max(initial=0)), int(wanted[:, 1].max(initial=0)))
    key = spans.module * width + spans.bucket
    order = np.argsort(key, kind="stable")
    bounds = [np.searchsorted(key[order], wanted @ (width, 1), side) for side in ("left", "right")]
    yield from (order[first:end] for first, end in zip(*bounds, strict=True))


def _since_previous(rank: wire.Ints, spans: wire.Spans) -> wire.Ints:
    """Return the time from the readiness of the bucket before, in the same step, rank and module; 0 for the first.

    It is 0 for a unit's collective, before which others move as well.
    """
    order = np.lexsort((spans.ready_ns, spans.module, rank, spans.step))
    ready = spans.ready_ns[order]
    since = np.diff(ready, prepend=0)
    keys = (spans.step[order], rank[order], spans.module[order])
    is_first = np.zeros(len(order), bool)
    for key in keys:
        is_first |= np.diff(key, prepend=-1) != 0
    since[is_first] = 0
    result = np.empty_like(since)
    result[order] = since
    return np.where(spans.waited_ns == wire.UNKNOWN, np.maximum(result, 0), 0)
