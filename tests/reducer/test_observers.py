"""The reducer reaches telemetry through `ddpobs.observers` alone, and so do the doors, which also join it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddpobs

PACKAGE = Path(ddpobs.__file__).parent
TELEMETRY_IMPORT = re.compile(r"^\s*(from|import)\s+ddpobs\S*(\s+import)?.*\b(recording|steps|export)\b", re.MULTILINE)


@pytest.mark.parametrize("folder", ["reducer", "buckets", "comm", "torch_seam", "attachment", "horovod"])
def test_no_file_imports_telemetry_not_even_for_its_types(folder: str) -> None:
    files = [*sorted((PACKAGE / folder).rglob("*.py")), PACKAGE / "ddp.py"]
    assert len(files) > 1
    assert not [file.name for file in files if TELEMETRY_IMPORT.search(file.read_text())]


def test_the_pattern_finds_each_form_of_import() -> None:
    for line in (
        "    from ddpobs.recording.module_recorder import ModuleRecorder",
        "import ddpobs.steps.summary",
        "from ddpobs import wire, export",
    ):
        assert TELEMETRY_IMPORT.search(line)
