"""One timeline over ranks, from the ends of the collectives that they shared."""

from __future__ import annotations

import numpy as np

from ddpobs import wire


def offsets_ns(rank: wire.Ints, spans: wire.Spans) -> tuple[dict[int, int], int]:
    """What to add to each rank's times to put them on the lowest rank's clock, and the noise of doing so.

    All ranks end an all-reduce together: offset_r = median_i(done_{0,i} - done_{r,i}).

    Args:
        rank: Of each span, shape [rows].
        spans: Columns of shape [rows].

    Returns:
        Offsets by rank, and the median spread of the aligned ends over ranks, both in ns.
    """
    ranks = np.unique(rank)
    if not len(ranks):
        return {}, 0
    key = np.stack([spans.step, spans.module, spans.revision, spans.bucket])
    _, identity = np.unique(key, axis=1, return_inverse=True)
    identity = identity.reshape(-1)
    table = np.full((int(identity.max()) + 1, len(ranks)), np.nan)
    # Relative to the first end: a float holds 53 bits, a clock in ns more.
    base = {r: int(spans.done_ns[rank == r][0]) for r in ranks.tolist()}
    for column, r in enumerate(ranks.tolist()):
        mine = rank == r
        table[identity[mine], column] = spans.done_ns[mine] - base[r]
    table = table[~np.isnan(table).any(axis=1)]
    if not len(table):
        return {r: base[int(ranks[0])] - base[r] for r in ranks.tolist()}, 0
    shift = np.median(table[:, :1] - table, axis=0)
    aligned = table + shift
    spread = round(float(np.median(aligned.max(axis=1) - aligned.min(axis=1))))
    first = int(ranks[0])
    return {r: base[first] - base[r] + round(float(shift[c])) for c, r in enumerate(ranks.tolist())}, spread


def aligned(rank: wire.Ints, offsets: dict[int, int], times_ns: wire.Ints) -> wire.Ints:
    """Times of many ranks on the lowest rank's clock; unknown ones stay unknown."""
    ranks, place = np.unique(rank, return_inverse=True)
    shift = np.array([offsets.get(r, 0) for r in ranks.tolist()], np.int64)[place]
    return np.where(times_ns == wire.UNKNOWN, times_ns, times_ns + shift)
