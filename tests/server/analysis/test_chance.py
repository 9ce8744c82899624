"""The p-value of being late again and again."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import numpy.typing as npt
import pytest
from ddpobs_server.analysis.slow_ranks.chance import beyond_chance, block_steps, chance_of

STEPS = 4
"""Steps of a block."""


def permuted_chance(late: npt.NDArray[np.bool_]) -> list[float]:
    """Return the share of all orders of the ranks in the blocks in which any rank has as much as each rank had."""
    blocks = late.reshape(len(late) // STEPS, STEPS, -1).sum(axis=1).tolist()
    maxima = [max(map(sum, zip(*order, strict=True))) for order in product(*map(permutations, blocks))]
    return [sum(most >= had for most in maxima) / len(maxima) for had in np.sum(blocks, axis=0)]


def test_the_chance_of_two_ranks_is_the_share_of_all_orders() -> None:
    random = np.random.default_rng(0)
    for share in (0.1, 0.3, 0.8):
        late = random.random((8 * STEPS, 2)) < share
        late[:, 1] |= random.random(8 * STEPS) < 0.2
        assert np.max(chance_of(late), initial=0.0) == 1.0
        expected = permuted_chance(late)
        assert chance_of(late).min() == pytest.approx(min(expected))


def test_the_chance_of_more_ranks_is_at_most_a_little_above_the_share_of_all_orders() -> None:
    late = np.zeros((6 * STEPS, 3), bool)
    late[:, 2] = True
    late[:STEPS, 2], late[:STEPS, 0] = False, True
    exact = permuted_chance(late)[2]
    assert exact <= chance_of(late)[2] <= 1.01 * exact


def test_late_by_a_cost_is_as_rare_as_late_by_a_count() -> None:
    late = np.zeros((60, 2), bool)
    late[4::7, 1] = True
    expected = 2 * 0.5 ** late[:, 1].sum()
    assert chance_of(late)[1] == pytest.approx(expected)
    assert chance_of(late * 120e6)[1] == pytest.approx(expected)


def test_chance_is_small_for_the_rank_that_is_always_late_and_large_for_the_others() -> None:
    late = np.zeros((80, 4), bool)
    late[:, 2] = True
    chance = chance_of(late)
    assert chance[2] == pytest.approx(4 * 0.25**20)
    assert set(np.delete(chance, 2).tolist()) == {1.0}


def test_chance_is_one_if_all_ranks_are_late_equally_often() -> None:
    assert chance_of(np.ones((80, 3), bool)).tolist() == [1.0, 1.0, 1.0]


def noise(steps: int = 60) -> npt.NDArray[np.float64]:
    return np.random.default_rng(1).normal(0, 2e6, (steps, 2))


def test_single_late_steps_and_a_lasting_delay_have_the_shortest_blocks() -> None:
    excess_ns = noise()
    excess_ns[4::7, 0] += 120e6
    excess_ns[:, 1] += 40e6
    assert max(block_steps(excess_ns[:, rank]) for rank in range(2)) <= STEPS + 1


@pytest.mark.parametrize("first", range(7))
def test_a_rank_that_is_late_in_every_seventh_step_of_sixty_is_beyond_chance(first: int) -> None:
    excess_ns = noise()
    excess_ns[first::7, 0] += 120e6
    assert list(beyond_chance(excess_ns > 20e6, [0, 1], excess_ns)) == [0]


def test_two_bursts_of_late_steps_are_two_events_and_no_habit() -> None:
    excess_ns = noise()
    for first in (4, 34):
        excess_ns[first : first + 18, 0] += 30e6 * np.hanning(18)
    late = excess_ns > 6e6
    assert chance_of(late)[0] < 0.01
    assert block_steps(excess_ns[:, 0]) >= 8
    assert beyond_chance(late, [0], excess_ns) == {}
