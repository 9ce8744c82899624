"""Exposed communication divided into waiting for later ranks and moving data."""

from __future__ import annotations

import numpy as np
from ddpobs_server.analysis.steps.step_bins import bins_of_steps, over_ranks
from ddpobs_server.analysis.steps.waiting import STEP_PARTS, parts_ns, waiting_ns

from ddpobs import wire
from tests.support.columns import make_steps

COLLECTIVES = [0, 1, 0, 1, wire.UNKNOWN]
EXPOSED = [70, 30, 10, 35, 50]


def rows() -> wire.Steps:
    """Two steps of two ranks, and one that no other rank has."""
    return make_steps(
        step=[0, 1, 0, 1, 2],
        collective=COLLECTIVES,
        exposed_comm_ns=EXPOSED,
        end_ns=100,
        backward_ns=100 - np.array(EXPOSED),
    )


def test_a_rank_waits_for_as_long_as_its_communication_exceeds_the_least_of_the_step() -> None:
    assert waiting_ns(rows()).tolist() == [60, 0, 0, 5, 0]


def test_the_parts_of_a_step_add_up() -> None:
    parts = parts_ns(rows())
    assert parts.sum(axis=1).tolist() == [100] * 5
    assert parts[:, STEP_PARTS.index("exposed_comm")].tolist() == [10, 30, 10, 30, 50]


def test_bins_hold_the_median_waiting_of_each_rank_and_over_the_ranks() -> None:
    bins = bins_of_steps(np.array([0, 0, 1, 1, 1]), rows(), 2)
    assert bins.select(bins.number == 0).column("waiting_median_ns").tolist() == [30, 2]
    assert over_ranks(bins).column("waiting_median_ns").tolist() == [16, 0]
