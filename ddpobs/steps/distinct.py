"""The different values of an array."""

from __future__ import annotations

import numpy as np

from ddpobs.wire import Ints


def distinct(values: Ints) -> Ints:
    """The different values of an array, ascending.

    `np.unique` does the same, but its first call imports `numpy.ma`, 6 ms of processor time amid training.
    """
    ordered = np.sort(values)
    found: Ints = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return found
