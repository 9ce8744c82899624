"""`ddpobs import` where something is missing; `tests/integration/test_import.py` has it with a collector."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpobs.cli import import_traces
from ddpobs.config import TelemetryConfig
from tests.support.cli import invoke
from tests.support.integration.collectors import absent
from tests.support.profiler_traces import trace


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [str(trace(tmp_path, f"rank{rank}.json", rank=rank)) for rank in range(2)]


def test_the_lines_about_the_ranks_need_no_collector(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    monkeypatch.delenv("DDPOBS_TELEMETRY", raising=False)
    url = absent()
    monkeypatch.setattr(import_traces, "settings", lambda _: TelemetryConfig(collector=url))
    done = invoke("import", *files)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == "3 steps of ranks 0 and 1"
    assert f"not stored: no collector at {url}" in done.stderr


def test_a_collector_that_was_named_must_answer(files: list[str]) -> None:
    assert invoke("import", *files, "--collector", absent()).exit_code == 1


def test_files_of_two_formats_are_refused(tmp_path: Path, files: list[str]) -> None:
    dump = tmp_path / "rank_1"
    dump.write_text('{"entries": []}')
    done = invoke("import", files[0], str(dump))
    assert done.exit_code == 2
    assert f"{dump}: expected a file of the same format as rank0.json, got another format" in done.stderr


def test_a_folder_is_refused(tmp_path: Path) -> None:
    done = invoke("import", str(tmp_path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{tmp_path}: expected a file, got a folder" in done.stderr
