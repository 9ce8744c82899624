"""The box at the end of a training: at most ten lines, whatever the collector answers."""

from __future__ import annotations

from typing import Any

import pytest

from ddpobs.terminal.verdict_box import MOST_LINES, box, in_ascii

ADDRESS = "http://c:1/runs/r"
PARTS = [
    {"title": "steps: backward", "group": "steps", "share": 0.5},
    {"title": "steps: forward", "group": "steps", "share": 0.25},
    {"title": "start-up: interpreter and imports", "group": "start_up", "share": 0.125},
    {"title": "start-up: model", "group": "start_up", "share": 0.125},
]


def finding(**changes: Any) -> dict[str, Any]:
    gain = {"ratio": 0.31, "whole": "step"}
    return {
        "severity": "critical",
        "title": "Rank 3 is slow in backward: 14 ms more",
        "remedy": "Look.",
        "gain": gain,
    } | changes


def rows(findings: list[dict[str, Any]], parts: list[dict[str, Any]], missing: tuple[str, ...] = ()) -> list[str]:
    diagnosis = {"findings": findings, "steps_seen": 9, "missing": missing}
    lines = box(diagnosis, {"parts": parts}, ADDRESS, 80, colour=False)
    assert {len(line) for line in lines} == {80}
    assert len(lines) <= MOST_LINES
    return [line[2:-2].rstrip() for line in lines[1:-1]]


def test_the_box_has_verdict_reason_remedy_gain_phases_and_address() -> None:
    assert rows([finding(), finding()], PARTS) == [
        "critical: Rank 3 is slow in backward (1 more)",
        "why     14 ms more",
        "do      Look.",
        "gain    31% of every step",
        "time    " + "█" * 20 + "▓" * 10 + "▒" * 10,
        "        █ backward 50%  ▓ forward 25%  ▒ start-up 25%",
        ADDRESS,
    ]


def test_long_texts_are_cut_and_the_address_stays() -> None:
    long = finding(title=f"Rank 3: {'very slow ' * 40}", remedy="look again " * 40, gain=None)
    lines = rows([long], PARTS * 9)
    assert len(lines) == MOST_LINES - 2 - 1
    assert [line[:8].strip() for line in lines[1:4]] == ["why", "do", ""]
    assert lines[3].endswith("…")
    assert lines[-1] == ADDRESS


def test_the_second_sentence_of_a_title_is_the_reason() -> None:
    lines = rows([finding(title="Rank 1 was killed at 1.5 s. Rank 0 failed")], [])
    assert lines[:2] == ["critical: Rank 1 was killed at 1.5 s", "why     Rank 0 failed"]


def test_a_gain_of_the_run_is_an_upper_bound() -> None:
    assert "gain    at most 20% of the run's wall time" in rows([finding(gain={"ratio": 0.2, "whole": "run"})], PARTS)


def test_without_findings_and_phases_the_box_counts_the_steps() -> None:
    missing = "2 kinds of finding could not be judged: `ddpobs report` has the reasons"
    assert rows([], [], ("a", "b")) == ["no finding in 9 steps", missing, ADDRESS]


def test_control_characters_of_the_collector_do_not_reach_the_terminal() -> None:
    assert rows([finding(title="a\x1b[2Jb: c")], [])[0] == "critical: a\\x1b[2Jb"


@pytest.mark.parametrize("colour", [True, False])
def test_only_a_terminal_with_colours_gets_them(colour: bool) -> None:
    diagnosis = {"findings": [finding()], "steps_seen": 9, "missing": []}
    lines = box(diagnosis, {"parts": []}, ADDRESS, 80, colour=colour)
    assert ("\x1b[1;31m" in lines[1], "\x1b" in "".join(lines)) == (colour, colour)


def test_a_stream_without_unicode_gets_the_same_box_in_ascii() -> None:
    diagnosis = {"findings": [finding(remedy="naïve")], "steps_seen": 9, "missing": []}
    lines = in_ascii(box(diagnosis, {"parts": PARTS}, ADDRESS, 80, colour=False))
    assert "".join(lines).isascii()
    assert lines[0].startswith("+- ddpobs --")
    assert any("####" in line for line in lines)
