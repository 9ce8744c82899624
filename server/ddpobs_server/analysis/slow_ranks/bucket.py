"""Find the bucket in which a slow rank's backward falls behind, or the unit in which its forward or backward does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddpobs import wire
from ddpobs.shared.delay import excess_of
from ddpobs.shared.words import format_bucket
from ddpobs_server.analysis.evidence import MAX_LISTED, ColumnReader, Evidence
from ddpobs_server.analysis.slow_ranks.lag import largest_lag
from ddpobs_server.analysis.slow_ranks.slow_rank import LateBucket, SlowRank
from ddpobs_server.analysis.slow_ranks.unit import has_units, late_unit
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps

MAX_STEPS, MAX_RANKS = 200, 8
"""Latest steps, and ranks (the slow rank and some others), in which the bucket is looked for."""
_USER = wire.COMM_KINDS.index("user")
_Layouts = dict[tuple[int, int], wire.Layout]


def with_buckets(slow_ranks: list[SlowRank], evidence: Evidence, columns: ColumnReader) -> list[SlowRank]:
    """Add the late bucket and its parameters to ranks with a slow backward, at most `MAX_RANKS` of them.

    Raises:
        ColumnsTooLargeError: The spans have too many rows.
    """
    examined = [slow for slow in slow_ranks if slow.phase in {"forward", "backward"}]
    layouts = {(layout.module, layout.revision): layout for layout in (columns.layouts() if examined else [])}
    examined = [slow for slow in examined if slow.phase == "backward" or has_units(layouts.values())][:MAX_RANKS]
    if not layouts:
        return slow_ranks
    return [
        replace(slow, bucket=_late_bucket(slow, evidence, columns, layouts)) if slow in examined else slow
        for slow in slow_ranks
    ]


def _late_bucket(slow: SlowRank, evidence: Evidence, columns: ColumnReader, layouts: _Layouts) -> LateBucket | None:
    row_rank, spans = _late_spans(slow, evidence, columns)
    if has_units(layouts.values()):
        excess_ns = min(slow.excess_ns, slow.phase_excess_ns[slow.phase])
        return _in_layout(late_unit(slow.rank, row_rank, spans, excess_ns, layouts), layouts)
    if not len(row_rank) or _meets_between_buckets(slow.rank, spans.select(row_rank == slow.rank), columns):
        return None
    began_ns = backward_began_ns((evidence.rank, evidence.steps), (row_rank, spans))
    excess_ns = min(slow.excess_ns, slow.phase_excess_ns["backward"])
    return _in_layout(late_bucket(slow.rank, row_rank, spans, began_ns, excess_ns), layouts)


def _late_spans(slow: SlowRank, evidence: Evidence, columns: ColumnReader) -> tuple[wire.Ints, wire.Spans]:
    """Read the spans of the slow rank and some others, for the latest steps in which the rank was late."""
    joined = evidence.joined
    latest = joined.between(*slow.steps).latest(MAX_STEPS)
    late = late_collectives(latest, slow.rank, slow.steps[0], slow.excess_ns)
    selected = np.isin(evidence.rank, comparison_ranks(slow.rank, joined.ranks))
    selected &= np.isin(evidence.steps.collective, late)
    row_rank, step = evidence.rank[selected], evidence.steps.step[selected]
    # With uneven inputs the ranks' step numbers part: ranks with the same range of steps are read together.
    ranges: dict[tuple[int, int], list[int]] = {}
    for rank in np.unique(row_rank).tolist():
        numbers = step[row_rank == rank]
        ranges.setdefault((int(numbers.min()), int(numbers.max())), []).append(rank)
    parts = [columns.spans(ranks, first, last) for (first, last), ranks in ranges.items()]
    if not parts:
        return row_rank, wire.Spans.from_table(np.zeros((len(wire.Spans.names), 0), np.int64))
    span_rank, spans = np.concatenate([ranks for ranks, _ in parts]), wire.Spans.concat([rows for _, rows in parts])
    width = int(joined.ranks.max()) + 1
    is_late = np.isin(spans.step * width + span_rank, step * width + row_rank)
    return span_rank[is_late], spans.select(is_late)


def comparison_ranks(slow: int, ranks: wire.Ints) -> list[int]:
    """Return a slow rank and up to seven others, spread evenly over the world."""
    other_ranks = ranks[ranks != slow]
    chosen = np.linspace(0, len(other_ranks) - 1, min(len(other_ranks), MAX_RANKS - 1)).astype(np.int64)
    return [slow, *other_ranks[chosen].tolist()]


def late_collectives(joined: JoinedSteps, rank: int, first: int, typical_ns: float) -> wire.Ints:
    """Return the collectives of the steps from `first` on in which a rank was late by at least half of `typical_ns`."""
    index = int(np.searchsorted(joined.ranks, rank))
    is_typical = excess_of(joined.own_ns, index) >= 0.5 * typical_ns
    return joined.collective[is_typical & (joined.step >= first)]


def _meets_between_buckets(rank: int, spans: wire.Spans, columns: ColumnReader) -> bool:
    """Whether a rank waits for a user's collective between two buckets of a step, as with SyncBatchNorm.

    The other ranks' waits for a late rank are then part of their spans, so no bucket stands out.
    """
    steps, index = np.unique(spans.step, return_inverse=True)
    if not len(steps):
        return False
    first, last = np.full(len(steps), spans.ready_ns.max()), np.full(len(steps), spans.ready_ns.min())
    np.minimum.at(first, index, spans.ready_ns)
    np.maximum.at(last, index, spans.ready_ns)
    comms = columns.comms(rank, int(steps[0]), int(steps[-1]))
    comms = comms.select((comms.kind == _USER) & np.isin(comms.step, steps))
    row = np.searchsorted(steps, comms.step)
    return bool(((comms.launched_ns > first[row]) & (comms.launched_ns < last[row])).any())


def backward_began_ns(steps: tuple[wire.Ints, wire.Steps], spans: tuple[wire.Ints, wire.Spans]) -> wire.Ints:
    """Return the start of backward: the step's last readiness minus its backward phase.

    It is defined for steps with one micro-step.

    Args:
        steps: Rank of each row, and columns, sorted by step and rank.
        spans: The same, or rank by rank; of all modules of a step, not empty.

    Returns:
        Start for each span, on its rank's clock. It is `wire.UNKNOWN` if the step is not in `steps` or has several
        micro-steps.
    """
    (step_rank, step), (span_rank, span) = steps, spans
    origin, final = span.step.min(), span.step.max()
    usable = np.flatnonzero((step.micro_steps == 1) & (step.step >= origin) & (step.step <= final))
    width = max(int(span_rank.max()), int(step_rank.max(initial=0))) + 1
    keys = (step.step[usable] - origin) * width + step_rank[usable]
    span_keys = (span.step - origin) * width + span_rank
    begins = np.flatnonzero(np.diff(span_keys, prepend=span_keys[0] - 1))
    last_ready = np.maximum.reduceat(span.ready_ns, begins)
    row = np.searchsorted(keys, span_keys[begins], "right") - 1
    has_step = row >= 0
    has_step[has_step] = keys[row[has_step]] == span_keys[begins][has_step]
    began = np.full(len(begins), wire.UNKNOWN, np.int64)
    began[has_step] = last_ready[has_step] - step.backward_ns[usable][row[has_step]]
    return np.repeat(began, np.diff(begins, append=len(span_keys)))


def late_bucket(
    rank: int, row_rank: wire.Ints, spans: wire.Spans, began_ns: wire.Ints, excess_ns: float
) -> tuple[int, int, int] | None:
    """Return the bucket in which at least half of a slow rank's excess arises.

    The compute span of a bucket begins at the previous bucket's readiness, in any module, so a lag shows only where it
    arises. Of several buckets the one with the largest total lag is returned: one late step may be a spike anywhere.

    Args:
        rank: The slow rank.
        row_rank: Rank of each span.
        spans: Spans of the steps in which the rank was late, of all modules.
        began_ns: Start of backward for each span, on that rank's clock; `wire.UNKNOWN` if unknown.
        excess_ns: Time that the rank takes longer than the others in such a step.

    Returns:
        Module, layout revision and bucket index; None if the lag grows evenly or the ranks' buckets do not match.
    """
    order = np.lexsort((spans.ready_ns, row_rank, spans.step))
    order = order[began_ns[order] >= 0]
    sorted_rank, rows = row_rank[order], spans.select(order)
    is_first = (np.diff(rows.step, prepend=-1) != 0) | (np.diff(sorted_rank, prepend=-1) != 0)
    compute_ns = rows.ready_ns - np.where(is_first, began_ns[order], np.roll(rows.ready_ns, 1))
    return largest_lag(rank, sorted_rank, rows, compute_ns, excess_ns)


def _in_layout(bucket_key: tuple[int, int, int] | None, layouts: _Layouts) -> LateBucket | None:
    """Return the bucket with its parameters, if it is in a layout."""
    layout = layouts.get(bucket_key[:2]) if bucket_key else None
    if bucket_key is None or layout is None or bucket_key[2] >= len(layout.buckets):
        return None
    index, bucket = bucket_key[2], layout.buckets[bucket_key[2]]
    names = tuple(parameter.name for parameter in bucket.parameters[:MAX_LISTED])
    where = f"unit {bucket.unit}" if bucket.unit else format_bucket(layout.module, index, bucket)
    return LateBucket(layout.module, index, names, where)
