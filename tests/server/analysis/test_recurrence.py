"""The p-value of being late again and again."""

from __future__ import annotations

import numpy as np
import pytest
from ddpobs_server.analysis.slow_ranks import recurrence
from ddpobs_server.analysis.slow_ranks.recurrence import chance_of


def test_chance_is_small_for_the_rank_that_is_always_late_and_large_for_the_others() -> None:
    late = np.zeros((80, 4), bool)
    late[:, 2] = True
    chance = chance_of(late)
    assert chance[2] == pytest.approx(1 / 401)
    assert set(np.delete(chance, 2).tolist()) == {1.0}


def test_chance_is_one_if_all_ranks_are_late_equally_often() -> None:
    assert chance_of(np.ones((80, 3), bool)).tolist() == [1.0, 1.0, 1.0]


def test_rotating_many_ranks_gives_the_same_chance_as_permuting_them(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for share in (0.02, 0.1, 0.3):
        late = random.random((400, 24)) < 0.1
        late[:, 5] |= random.random(400) < share
        chances = []
        for max_permuted in (0, 2**20):
            monkeypatch.setattr(recurrence, "_MAX_PERMUTED", max_permuted)
            chances.append(chance_of(late))
        # Both draw 400 times: the standard deviation of the chance is at most 0.025.
        assert np.abs(chances[0] - chances[1]).max() < 0.1
        assert (chances[0][5] <= 0.01) == (chances[1][5] <= 0.01)
