"""The last lines of a command's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ddpobs.launch.command_end import last_lines
from ddpobs.terminal.verdict_box import box, in_ascii


@pytest.mark.parametrize("encoded", [list, in_ascii])
def test_the_box_of_an_earlier_training_is_no_line_of_the_command(
    encoded: Callable[[Sequence[str]], list[str]],
) -> None:
    diagnosis = {"summary": "Balanced.", "findings": []}
    frame = encoded(box(diagnosis, {"parts": [], "wall_ns": 1}, "http://c:1/runs/r", 80, colour=True))
    assert len(frame) > 2
    lines = ["epoch 1", *frame, "┌ the user's │ own frame ┐", "RuntimeError: boom"]
    assert last_lines("\n".join(lines).encode()).splitlines() == [lines[0], *lines[-2:]]
