"""The delay of a rank over the other ranks, and waiting against moving. Ranks and collector compute them alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs import wire

Floats = npt.NDArray[np.float64]


def median_of_others(values: npt.NDArray[Any]) -> Floats:
    """Return for each rank the median over all other ranks.

    With the median of all ranks, two ranks would show half of their difference.

    Args:
        values: Shape [steps, ranks, ...] with at least two ranks.

    Returns:
        The same shape.
    """
    count = values.shape[1] - 1
    low, high = (count - 1) // 2, count // 2
    middle = np.partition(values, range(low, high + 2), axis=1)

    def order_statistic(k: int) -> Floats:
        """Return the k-th smallest value of the others; a rank's own value at or below it moves the index by one."""
        value, successor = middle[:, k, None], middle[:, k + 1, None]
        return np.where(values > value, value, successor)

    if low == high:
        return np.asarray(order_statistic(low), np.float64)
    return np.asarray((order_statistic(low) + order_statistic(high)) / 2)


def excesses(times: npt.NDArray[Any]) -> Floats:
    """Return what each rank takes longer than the median of all others; arguments and shape as `median_of_others`."""
    return np.asarray(times - median_of_others(times))


def excess_of(times: npt.NDArray[Any], rank: int) -> Floats:
    """Return what one rank takes longer than the median of all others: a column of `excesses`.

    Args:
        times: Shape [steps, ranks] with at least two ranks.
        rank: Index of the rank.

    Returns:
        Shape [steps].
    """
    return np.asarray(times[:, rank] - np.median(np.delete(times, rank, axis=1), axis=1))


def delays(own_ns: npt.NDArray[Any], excess_ns: Floats) -> tuple[wire.Ints, Floats]:
    """Return the last rank of each step, and its excess: the step's delay.

    Args:
        own_ns: Own time, shape [steps, ranks].
        excess_ns: Its `excesses`.

    Returns:
        Index of the rank, and the delay; each of shape [steps].
    """
    last = own_ns.argmax(axis=1)
    return last, excess_ns[np.arange(len(own_ns)), last]


def moving(exposed_ns: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the part of each step's exposed communication in which data moves; a rank waits in the rest of its own.

    The last rank to arrive waits for none, so the least exposed time of a step holds no waiting.

    Source: the split of a collective's time by TraceLens (https://github.com/AMD-AGI/TraceLens), per step.

    Args:
        exposed_ns: Exposed communication, shape [steps, ranks].

    Returns:
        Shape [steps].
    """
    return np.asarray(exposed_ns.min(axis=1))


def is_late(excess_ns: Floats, step_ns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether an excess is above `wire.STRAGGLER_SHARE` of the step, in any shape that fits both."""
    return np.asarray(excess_ns > wire.STRAGGLER_SHARE * step_ns)
