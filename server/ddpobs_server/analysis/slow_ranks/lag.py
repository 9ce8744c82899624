"""The part of a step in which a slow rank falls behind: where it computes for longer than the others."""

from __future__ import annotations

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.steps.joined_steps import Floats

_BUCKET_BITS = 20
"""Bits that hold the index of any bucket."""


def largest_lag(
    rank: int, row_rank: wire.Ints, rows: wire.Spans, compute_ns: wire.Ints, excess_ns: float
) -> tuple[int, int, int] | None:
    """Return module, revision and bucket with the largest total lag of a rank; None if it has no half of the excess.

    Args:
        rank: The slow rank.
        row_rank: Rank of each row.
        rows: Module, revision and bucket of each row.
        compute_ns: Time that the rank computed for it.
        excess_ns: Time that the rank takes longer than the others in a late step.
    """
    revisions, revision_index = np.unique(rows.revision, return_inverse=True)
    layout = rows.module * len(revisions) + revision_index
    keys = layout << _BUCKET_BITS | rows.bucket
    _, example_rows, key_index = np.unique(keys, return_index=True, return_inverse=True)
    medians, counts = _group_medians(2 * key_index + (row_rank == rank), compute_ns, 2 * len(example_rows))
    lag_ns = medians[1::2] - medians[::2]
    comparable = ~np.isnan(lag_ns)
    columns = (lag_ns * counts[1::2], lag_ns, example_rows)
    lags = zip(*(values[comparable].tolist() for values in columns), strict=True)
    _, largest_ns, row = max(lags, key=lambda lag: lag[:2], default=(0.0, 0.0, 0))
    if largest_ns < max(1.0, 0.5 * excess_ns):
        return None
    return int(rows.module[row]), int(rows.revision[row]), int(rows.bucket[row])


def _group_medians(group: wire.Ints, values: wire.Ints, groups: int) -> tuple[Floats, wire.Ints]:
    """Return each group's median (NaN if the group is empty) and its number of values; both of shape [groups]."""
    counts = np.bincount(group, minlength=groups)
    begins, filled = np.cumsum(counts) - counts, counts > 0
    values = values[np.lexsort((values, group))]
    medians = np.full(groups, np.nan)
    medians[filled] = (values[(begins + (counts - 1) // 2)[filled]] + values[(begins + counts // 2)[filled]]) / 2
    return medians, counts
