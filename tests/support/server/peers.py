"""Straggler statistics of two ranks."""

from __future__ import annotations

import numpy as np

from ddpobs import wire


def peers(first: int, last: int) -> wire.Peers:
    """Rank 1 is late by 3 ns in each of these steps."""
    count = last - first + 1
    columns = dict.fromkeys(wire.Peers.__struct_fields__[3:], np.zeros(2, np.int64))
    columns |= {
        "rank": np.arange(2),
        "delay_ns": np.array([0, 3 * count]),
        "wait_ns": np.array([3 * count, 0]),
        "moving_ns": np.full(2, count),
    }
    return wire.Peers(first_collective=first, last_collective=last, steps=count, **columns)
