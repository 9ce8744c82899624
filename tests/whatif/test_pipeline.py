"""The replay of a pipeline's step, and what slow ranks of it cost."""

from __future__ import annotations

import numpy as np
import pytest

from ddpobs.whatif.pipeline import pipeline_slowdown, replay_pipeline_ns


@pytest.mark.parametrize("forwards_first", [False, True])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 8), (4, 2)])
def test_equal_stages_have_the_formulas_bubble(stages: int, micro_batches: int, forwards_first: bool) -> None:
    """m + p - 1 forwards and backwards: GPipe (arXiv 1811.06965), and 1F1B (arXiv 2104.04473)."""
    forward, backward = np.full(stages, 1.0), np.full(stages, 2.0)
    took = replay_pipeline_ns(forward, backward, micro_batches, forwards_first=forwards_first)
    assert took == pytest.approx(3.0 * (micro_batches + stages - 1))


def test_a_slow_last_stage_delays_each_micro_batch() -> None:
    """1F1B by hand: F0 to 1, then on stage 1 F 1 to 4, B to 10, F to 13, B to 19; the last B of stage 0 ends at 21."""
    assert replay_pipeline_ns(np.array([1.0, 3.0]), np.array([2.0, 6.0]), 2) == 21
    assert replay_pipeline_ns(np.array([1.0, 3.0]), np.array([2.0, 6.0]), 2, forwards_first=True) == 21


def test_backwards_between_forwards_end_earlier_behind_a_slow_first_stage() -> None:
    """1F1B: the last forward ends at 31, and its backward follows 1 + 1 + 1. GPipe: at 30, and then 1 + 3 + 1."""
    forward, backward = np.array([10.0, 1.0]), np.array([1.0, 1.0])
    assert replay_pipeline_ns(forward, backward, 3) == pytest.approx(34)
    assert replay_pipeline_ns(forward, backward, 3, forwards_first=True) == pytest.approx(35)


def _computing(excess: float) -> tuple[np.ndarray, np.ndarray]:
    """Five steps, two replicas and three stages; rank (1, 2) computes longer in backward."""
    forward, backward = np.full((5, 2, 3), 8.0), np.full((5, 2, 3), 16.0)
    backward[:, 1, 2] += excess
    return forward, backward


def test_without_a_slow_rank_nothing_is_lost() -> None:
    slowdown = pipeline_slowdown(*_computing(0.0), 8)
    assert slowdown.total == pytest.approx(1)
    assert slowdown.by_rank == pytest.approx(np.ones((2, 3)))
    assert slowdown.lost_share == pytest.approx(0)


def test_the_slow_rank_and_its_phase_explain_the_slowdown() -> None:
    slowdown = pipeline_slowdown(*_computing(24.0), 8)
    # The last stage computes 8 times 6, after two forwards and before two backwards of 1 and 2; ideally 10 times
    # 24 + 24 / 6 over 8, the ranks' mean.
    assert slowdown.total == pytest.approx((8 * 6 + 2 * 3) / (10 * (24 + 4) / 8))
    assert slowdown.by_rank.argmax() == 5, "replica 1, stage 2"
    assert slowdown.by_rank.max() > slowdown.total
    assert slowdown.by_phase == pytest.approx([1, slowdown.total])
