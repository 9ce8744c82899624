"""The step of a pipeline's schedule, from the computation of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from ddpobs.whatif.link import Floats


def predicted_schedule_ns(computing_ns: Sequence[float] | Floats, slots: int) -> float:
    """Return the time of a schedule's step from each stage's computation in it.

    The slowest stage computes all its micro-batches; each other stage adds the time of one, in which the pipeline fills
    and drains: max b + (sum b - max b) / slots. With equal stages that is the usual formula.

    Args:
        computing_ns: Computation of each stage in a step, shape [stages].
        slots: Micro-batches of a step, times the stages on each rank.
    """
    slowest = max(computing_ns)
    return float(slowest + (sum(computing_ns) - slowest) / slots)
