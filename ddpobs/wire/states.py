"""States of a run and of a rank: the only list of them. The collector computes them, commands and pages show them."""

from __future__ import annotations

from typing import Literal, get_args

RunState = Literal["running", "stalled", "hung", "finished", "interrupted", "failed", "lost"]
RankState = Literal["running", "hung", "finished", "interrupted", "failed", "lost"]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)
OVER: tuple[RunState, ...] = ("finished", "interrupted", "failed", "lost")
"""States of a run in which no more steps are expected, although a new attempt may bring some."""
STATE_COLOURS: dict[str, str] = {
    "running": "green",
    "stalled": "yellow",
    "hung": "red",
    "finished": "green",
    "interrupted": "cyan",
    "failed": "red",
    "lost": "red",
}
"""Colour of each state in a terminal."""
