"""Find the unit of a fully sharded model in which a slow rank falls behind.

A rank computes between the end of one collective and the begin of the next. After the all-gather of a unit in forward
it computes that unit; before the reduce-scatter of a unit it has computed the unit's gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.lag import largest_lag

_GATHER, _GATHER_AGAIN = wire.UNIT_KINDS[:2]


def has_units(layouts: Iterable[wire.Layout]) -> bool:
    """Whether these are layouts of fully sharded models."""
    return any(bucket.unit for layout in layouts for bucket in layout.buckets[:1])


def late_unit(
    rank: int,
    row_rank: wire.Ints,
    spans: wire.Spans,
    excess_ns: float,
    layouts: Mapping[tuple[int, int], wire.Layout],
) -> tuple[int, int, int] | None:
    """Return the collective of the unit in which at least half of a slow rank's excess arises.

    Args:
        rank: The slow rank.
        row_rank: Rank of each span.
        spans: Spans of the steps in which the rank was late.
        excess_ns: Time that the rank takes longer than the others in such a step.
        layouts: By module and revision.

    Returns:
        Module, revision and row; None if the lag grows evenly, or arises between
        forward and backward, or if collectives run beside the computation: their begins do not
        show what is computed.
    """
    blocks = spans.waited_ns == spans.done_ns - spans.launched_ns
    if not len(row_rank) or not blocks.all():
        return None
    order = np.lexsort((spans.launched_ns, row_rank, spans.step))
    ranks, rows = row_rank[order], spans.select(order)
    ends = np.flatnonzero((np.diff(rows.step, prepend=-1) == 0) & (np.diff(ranks, prepend=-1) == 0))
    kinds = _kinds(rows, layouts)
    # The computation before an all-gather is that of the unit gathered before it.
    computed = rows.select(np.where(np.isin(kinds[ends], (_GATHER, _GATHER_AGAIN)), ends - 1, ends))
    between = (kinds[ends] == _GATHER_AGAIN) & (kinds[ends - 1] == _GATHER)
    computed.revision[between] = wire.UNKNOWN  # The end of forward, the loss, and the root's own begin of backward.
    return largest_lag(rank, ranks[ends], computed, rows.ready_ns[ends] - rows.done_ns[ends - 1], excess_ns)


def _kinds(rows: wire.Spans, layouts: Mapping[tuple[int, int], wire.Layout]) -> npt.NDArray[np.str_]:
    """Return the kind of each row's collective; empty if it is not known."""
    known = {
        (*key, index): bucket.kind for key, layout in layouts.items() for index, bucket in enumerate(layout.buckets)
    }
    keys = zip(rows.module.tolist(), rows.revision.tolist(), rows.bucket.tolist(), strict=True)
    return np.array([known.get(key, "") for key in keys], np.str_)
