"""The reducer reaches telemetry through `ddpobs.observers` alone, and so do the doors, which also join it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddpobs
from tests.support.layers import CONTRACTS, DOORS

PACKAGE = Path(ddpobs.__file__).parent
TELEMETRY_IMPORT = re.compile(r"^\s*(from|import)\s+ddpobs\S*(\s+import)?.*\b(recording|steps|export)\b", re.MULTILINE)


@pytest.mark.parametrize("name", ["reducer", "buckets", "comm", "torch_seam", *DOORS])
def test_no_file_imports_telemetry_not_even_for_its_types(name: str) -> None:
    files = [*(PACKAGE / name).rglob("*.py"), *PACKAGE.glob(f"{name}.py")]
    assert files
    assert not [file.name for file in files if TELEMETRY_IMPORT.search(file.read_text())]


def test_the_contract_about_doors_has_every_door() -> None:
    (contract,) = [each for each in CONTRACTS if each["name"].startswith("Doors import ddpobs.observers")]
    assert sorted(contract["source_modules"]) == sorted(f"ddpobs.{door}" for door in DOORS)


def test_the_pattern_finds_each_form_of_import() -> None:
    for line in (
        "    from ddpobs.recording.module_recorder import ModuleRecorder",
        "import ddpobs.steps.summary",
        "from ddpobs import wire, export",
    ):
        assert TELEMETRY_IMPORT.search(line)
