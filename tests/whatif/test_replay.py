"""The replay of one backward against times worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ddpobs.whatif.link import Link
from ddpobs.whatif.replay import replay, without_slowdown

LINK = Link(1.0, 1.0, is_separated=True)


def test_transfers_queue_behind_each_other() -> None:
    timeline = replay(np.array([0.0, 2.0, 50.0]), np.array([9.0, 4.0, 3.0]), LINK)
    assert timeline.begun_ns.tolist() == [0, 10, 50]
    assert timeline.done_ns.tolist() == [10, 15, 54]
    assert timeline.exposed_ns == 4


def test_computation_slows_down_beside_communication() -> None:
    """10 ns of transfer hold 5 ns of computation at half speed; the rest runs at full speed."""
    timeline = replay(np.array([0.0, 20.0]), np.array([9.0, 0.0]), LINK, slowdown=1.0)
    assert timeline.ready_ns.tolist() == [0, 25]


@pytest.mark.parametrize("slowdown", [0.0, 0.25, 1.0])
def test_the_slowdown_is_taken_out_as_it_was_put_in(slowdown: float) -> None:
    work_ns = np.array([3.0, 5.0, 11.0, 40.0])
    timeline = replay(work_ns, np.array([9.0, 2.0, 1.0, 5.0]), LINK, slowdown)
    assert without_slowdown(timeline.ready_ns, timeline, slowdown) == pytest.approx(work_ns)


def test_groups_overlap_their_latency_and_share_the_link() -> None:
    both = np.array([0.0, 0.0]), np.array([10.0, 10.0])
    assert replay(*both, Link(5.0, 1.0, is_separated=True), queues=2).end_ns == 25
    assert replay(*both, Link(5.0, 1.0, is_separated=True), queues=1).end_ns == 30


def test_transfers_of_one_group_that_move_at_once_share_the_link() -> None:
    """The first moves alone for 4 ns, then half as fast; the third takes the place of the second."""
    timeline = replay(
        np.array([0.0, 4.0, 4.0]), np.array([10.0, 3.0, 1.0]), Link(0.0, 1.0, is_separated=True, in_flight=2)
    )
    assert timeline.begun_ns.tolist() == [0, 4, 10]
    assert timeline.done_ns.tolist() == [14, 10, 12]


def test_bytes_may_take_longer_beside_computation() -> None:
    timeline = replay(np.array([0.0, 12.0]), np.array([10.0, 4.0]), Link(0.0, 1.0, is_separated=True), drag=2.0)
    assert timeline.done_ns.tolist() == [16, 20]


def test_further_time_of_a_transfer_keeps_its_queue() -> None:
    timeline = replay(np.zeros(2), np.array([4.0, 4.0]), LINK, fixed_ns=np.array([2.0, 0.0]))
    assert timeline.done_ns.tolist() == [7, 12]
