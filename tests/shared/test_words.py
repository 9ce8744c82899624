"""Words that all views share."""

from __future__ import annotations

import pytest

from ddpobs import wire
from ddpobs.shared.words import fact_text, finding_heading, finding_lines, finding_parts, format_bucket, format_ranks

FINDING = {
    "severity": "critical",
    "verdict": "Rank 3 is slow in backward",
    "remedy": "Look on node-7.",
    "where": "node-7",
    "cause": "other processes",
    "when": "steps 3 to 9",
    "measure": "14 ms more",
    "gain": {"text": "14 ms of 46 ms a step"},
}


def test_the_parts_of_a_finding_are_always_in_one_order() -> None:
    assert finding_heading(FINDING) == "critical: Rank 3 is slow in backward"
    assert finding_lines(FINDING) == [
        ("measure", "14 ms more"),
        ("when", "steps 3 to 9"),
        ("cause", "other processes"),
        ("where", "node-7"),
        ("do", "Look on node-7."),
        ("saves", "14 ms of 46 ms a step"),
    ]


@pytest.mark.parametrize("gain", [None, {"text": ""}])
def test_an_empty_part_is_left_out(gain: dict[str, str] | None) -> None:
    assert finding_parts(FINDING | {"measure": "", "when": "", "gain": gain}) == {
        "cause": "other processes",
        "where": "node-7",
        "remedy": "Look on node-7.",
    }


def test_long_lists_are_counted() -> None:
    assert format_ranks([1]) == "rank 1"
    assert format_ranks([0, 2, 3]) == "ranks 0, 2 and 3"
    assert format_ranks(list(range(64))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"
    parameters = [wire.Parameter(name=name, size=1) for name in "abcd"]
    bucket = wire.Bucket(size_bytes=16, dtype="float32", parameters=parameters)
    assert format_bucket(0, 2, bucket) == "bucket 0.2: a, b, c, …"


def test_a_collective_of_a_unit_is_named_by_its_kind_and_its_unit() -> None:
    bucket = wire.Bucket(size_bytes=4, dtype="float32", parameters=[], kind="reduce_scatter", unit="blocks.3")
    assert format_bucket(0, 2, bucket) == "reduce-scatter of unit blocks.3"


def test_a_fact_is_shown_in_words() -> None:
    facts = (True, False, None, 0.39999961853027344, 12, "gloo")
    assert list(map(fact_text, facts)) == ["yes", "no", "none", "0.4", "12", "gloo"]
