"""Exposed communication in two parts: waiting for later ranks, and moving data.

Here each row of steps is divided. `ddpobs.shared.delay.moving` has the rule, and its source.
"""

from __future__ import annotations

import numpy as np

from ddpobs import wire

STEP_PARTS = ("data", "forward", "backward", "waiting", "exposed_comm", "optimizer", "other")
"""The parts of a step in their order: `exposed_comm` without its waiting, and the other phases."""


def waiting_ns(steps: wire.Steps) -> wire.Ints:
    """Return the part of each row's exposed communication in which its rank waits for later ranks, shape [rows].

    The ranks that have a row for a step's collective are compared. A row without a collective does not wait.
    """
    numbered = np.flatnonzero(steps.collective >= 0)
    order = numbered[np.argsort(steps.collective[numbered], kind="stable")]
    result = np.zeros(len(steps), np.int64)
    if len(order):
        begins = np.flatnonzero(np.diff(steps.collective[order], prepend=-1))
        exposed_ns = steps.exposed_comm_ns[order]
        moving_ns = np.minimum.reduceat(exposed_ns, begins)
        result[order] = exposed_ns - np.repeat(moving_ns, np.diff(begins, append=len(order)))
    return result


def parts_ns(steps: wire.Steps) -> wire.Ints:
    """Return the time of each of `STEP_PARTS`, shape [rows, parts]; they add up to the step."""
    waiting = waiting_ns(steps)
    by_name = {f"{phase}_ns": getattr(steps, f"{phase}_ns") for phase in wire.PHASES} | {"waiting_ns": waiting}
    by_name["exposed_comm_ns"] = steps.exposed_comm_ns - waiting
    return np.stack([by_name[f"{part}_ns"] for part in STEP_PARTS], axis=1)
