"""The layers of both sides as import-linter checks them, and the doors among them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
CONTRACTS: list[dict[str, Any]] = tomllib.loads(_PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]


def layers_of(container: str) -> list[list[str]]:
    """Folders of a package, layer by layer from left to right."""
    (contract,) = [each for each in CONTRACTS if each["type"] == "layers" and each.get("containers") == [container]]
    return [layer.split(" | ") for layer in contract["layers"]]


(DOORS,) = [layer for layer in layers_of("ddpobs") if "ddp" in layer]
"""Folders of the training side's doors, and the file of one."""
