"""The box at the end of a training, whatever the collector answers."""

from __future__ import annotations

from typing import Any

import pytest

from ddpobs.terminal.verdict_box import MAX_PART_ROWS, box, in_ascii

ADDRESS = "http://c:1/runs/r"
PARTS = [
    {"title": "steps: backward", "group": "steps", "group_title": "steps", "share": 0.5},
    {"title": "steps: forward", "group": "steps", "group_title": "steps", "share": 0.25},
    {"title": "start-up: interpreter and imports", "group": "start_up", "group_title": "start-up", "share": 0.125},
    {"title": "start-up: model", "group": "start_up", "group_title": "start-up", "share": 0.125},
]


def finding(**changes: Any) -> dict[str, Any]:
    return {
        "code": "straggler",
        "severity": "critical",
        "verdict": "Rank 3 is slow in backward",
        "measure": "14 ms more",
        "remedy": "Look.",
        "gain": {"text": "14 ms of 46 ms a step (31 ± 1 %)"},
    } | changes


def rows(findings: list[dict[str, Any]], parts: list[dict[str, Any]], summary: str = "") -> list[str]:
    diagnosis = {"findings": findings, "summary": summary, "missing": ["a"]}
    lines = box(diagnosis, {"parts": parts}, ADDRESS, 80, colour=False)
    assert {len(line) for line in lines} == {80}
    return [line[2:-2].rstrip() for line in lines[1:-1]]


def test_the_box_has_the_parts_of_the_worst_finding_phases_and_address() -> None:
    where = "node-7; bucket 0.2: decoder.4.weight"
    assert rows([finding(when="steps 3 to 9", cause="other processes", where=where), finding()], PARTS) == [
        "critical: Rank 3 is slow in backward (1 more)",
        "measure 14 ms more",
        "when    steps 3 to 9",
        "cause   other processes",
        "where   node-7; bucket 0.2: decoder.4.weight",
        "do      Look.",
        "saves   14 ms of 46 ms a step (31 ± 1 %)",
        "time    " + "█" * 20 + "▓" * 10 + "▒" * 10,
        "        █ backward 50 %  ▓ forward 25 %  ▒ start-up 25 %",
        ADDRESS,
    ]


def test_no_part_of_the_bar_is_written_as_nothing() -> None:
    small = [{"title": f"steps: {name}", "group": "steps", "share": 0.004} for name in ("data", "other")]
    half = [{"title": f"steps: {name}", "group": "steps", "share": 0.496} for name in ("forward", "backward")]
    assert rows([], [*half, *small])[-2] == "        █ forward 50 %  ▓ backward 50 %  ▒ rest 1 %"
    assert rows([], [*half, small[0]])[-2] == "        █ forward 50 %  ▓ backward 50 %"


def test_a_long_part_is_wrapped_and_a_page_of_text_ends_early() -> None:
    long = finding(verdict=f"Rank 3 is {'very ' * 20}slow", cause="x" * 1000, remedy="look again " * 10, gain=None)
    lines = rows([long], PARTS)
    assert (lines[1][:5], lines[1][-4:]) == ("very ", "slow")
    labels = [line[:8].strip() for line in lines[2:]]
    assert labels == ["measure", "cause", *[""] * (MAX_PART_ROWS - 1), "do", "", "time", "", "http://c"]
    assert lines[2 + MAX_PART_ROWS].endswith(" …")


def test_without_findings_the_box_has_the_verdict_alone() -> None:
    summary = "Too short to judge: 12 of 32 steps."
    assert rows([], [], summary) == [summary, ADDRESS]
    assert rows([finding(code="scaling-loss")], [], summary) == [summary, ADDRESS]


def test_control_characters_of_the_collector_do_not_reach_the_terminal() -> None:
    assert rows([finding(verdict="a\x1b[2Jb: c")], [])[0] == "critical: a\\x1b[2Jb: c"


@pytest.mark.parametrize("colour", [True, False])
def test_only_a_terminal_with_colours_gets_them(colour: bool) -> None:
    diagnosis = {"findings": [finding()], "summary": "", "missing": []}
    lines = box(diagnosis, {"parts": []}, ADDRESS, 80, colour=colour)
    assert ("\x1b[1;31m" in lines[1], "\x1b" in "".join(lines)) == (colour, colour)


def test_a_stream_without_unicode_gets_the_same_box_in_ascii() -> None:
    diagnosis = {"findings": [finding(remedy="naïve")], "steps_seen": 9, "missing": []}
    lines = in_ascii(box(diagnosis, {"parts": PARTS}, ADDRESS, 80, colour=False))
    assert "".join(lines).isascii()
    assert lines[0].startswith("+- ddpobs --")
    assert any("####" in line for line in lines)


def test_a_long_legend_has_two_rows_and_no_rest_that_is_its_largest_part() -> None:
    shares = {"backward": 0.31, "waiting for ranks": 0.25, "start-up": 0.22, "moving data": 0.12, "forward": 0.1}
    parts = [{"title": f"steps: {name}", "group": "steps", "share": share} for name, share in shares.items()]
    assert rows([], parts)[-3:-1] == [
        "        █ backward 31 %  ▓ waiting for ranks 25 %  ▒ start-up 22 %",
        "        ░ moving data 12 %  ▞ rest 10 %",
    ]
