"""The delays of ranks over steps: what is drawn, and what its summary says of the rest."""

from __future__ import annotations

import numpy as np
from ddpobs_server.analysis.slow_ranks.delay_map import DelayMap
from ddpobs_server.figures.kinds.ranks import ranks
from ddpobs_server.figures.picture import Picture
from ddpobs_server.figures.selection import Order, RankFilter, Selection
from ddpobs_server.figures.theme import theme_of

MS = 10**6


def picture(late: dict[int, int], *, count: int = 1024, text: str = "", order: Order = "cost") -> Picture:
    """Draw ten steps of some ranks, of which the given ones cause a delay, in ms of each step."""
    delay_ns = np.zeros((10, count))
    for rank, ms in late.items():
        delay_ns[:, rank] = ms * MS
    shares = np.isin(np.arange(count), list(late)).astype(float)
    steps = np.arange(10)
    delays = DelayMap(steps, steps, np.arange(count), delay_ns, shares, delay_ns.mean(axis=0))
    return ranks(delays, RankFilter(text, order, {}), [], set(late), theme_of(Selection()))


def test_of_a_thousand_ranks_those_that_caused_a_delay_are_drawn() -> None:
    drawn = picture({700: 25, 3: 40})
    assert drawn.shown["ranks"] == [3, 700]
    assert drawn.summary == (
        "1,024 of 1,024 ranks, steps 0 to 9. Rank 3 delays the others most: 40 ms a step, late in 100 % of the steps. "
        "The other 1,022 ranks, which caused no delay, are left out."
    )


def test_a_rank_that_is_asked_for_is_drawn_without_a_delay() -> None:
    assert picture({700: 25}, text="699-701").shown["ranks"] == [700, 699, 701]
    assert picture({700: 25}, order="rank").shown["ranks"] == list(range(1024))
    assert picture({1: 25}, count=8).shown["ranks"] == [1, 0, 2, 3, 4, 5, 6, 7]


def test_the_rank_with_the_largest_delay_is_named_beyond_those_that_are_drawn() -> None:
    drawn = picture({1500: 25}, count=2000, order="rank")
    assert drawn.shown["ranks"] == list(range(1024))
    assert drawn.summary == (
        "2,000 of 2,000 ranks, steps 0 to 9. Rank 1500 delays the others most: 25 ms a step, late in 100 % of the "
        "steps. The first 1,024 are drawn."
    )


def test_where_no_rank_is_late_nothing_is_drawn() -> None:
    balanced = picture({})
    assert balanced.plot is None
    assert balanced.summary == "1,024 of 1,024 ranks, steps 0 to 9. No rank was late by a tenth of a step."
    others = picture({700: 25}, text="0-9")
    assert (others.plot, others.shown) == (None, {"ranks": list(range(10))})  # The table of ranks has these.
    assert others.summary == "10 of 1,024 ranks, steps 0 to 9. None of them was late by a tenth of a step."
