"""Quantities in words."""

from __future__ import annotations

import pytest

from ddpobs.shared.quantities import counted, duration, rank_time, size_text, time_of_day, time_range

START_NS = 1_700_000_000 * 10**9


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (4e-7, "400 ns"),
        (0.00034, "340 µs"),
        (0.03, "30 ms"),
        (0.1314, "131 ms"),
        (0.9996, "1 s"),
        (1.25, "1.25 s"),
        (52, "52 s"),
        (119.4, "119 s"),
        (125, "2 min 5 s"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_duration_has_three_digits_or_two_units(seconds: float, words: str) -> None:
    assert duration(seconds * 1e9) == words


def test_two_times_have_the_time_between_and_their_dates_if_these_differ() -> None:
    assert time_range(START_NS, START_NS + 52 * 10**9) == "22:13:20–22:14:12 UTC (52 s)"
    next_day = "2023-11-14 22:13:20 – 2023-11-15 01:33:20 UTC (3 h 20 min)"
    assert time_range(START_NS, START_NS + 12_000 * 10**9) == next_day
    dated = time_range(START_NS, START_NS + 52 * 10**9, is_dated=True)
    assert dated == "2023-11-14 22:13:20–22:14:12 UTC (52 s)"
    assert time_range(START_NS, START_NS) == "2023-11-14 22:13:20 UTC"
    assert time_range(2**70, 2**70) == "(0 s)"
    assert time_of_day(2**70) == "unknown time"


def test_rank_time_sizes_and_counts() -> None:
    assert [rank_time(minutes * 60e9) for minutes in (0.00014, 0.73, 90, 204)] == [
        "0.0084 rank-seconds",
        "0.73 rank-minutes",
        "90 rank-minutes",
        "3.4 rank-hours",
    ]
    assert [size_text(size) for size in (12, 25e6)] == ["12 B", "25 MB"]
    assert [counted(count, "step") for count in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
