"""The architecture's table of layers is the one that import-linter checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.layers import layers_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


@pytest.mark.parametrize(("side", "container"), [("training", "ddpobs"), ("collector", "ddpobs_server")])
def test_the_table_has_every_layer_of_a_side_in_order(side: str, container: str) -> None:
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {side} | `")]
    documented = [re.findall(r"`(\w+)`", layer) for layer in row.split(" > ")]
    assert list(map(sorted, documented)) == list(map(sorted, layers_of(container)))
