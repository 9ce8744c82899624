"""Without torch, an environment with the extra `server` alone installs, imports and serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.rig import patience
from benchmarks.rig.collector import collector
from tests.support.server.batches import batch, get, put, spans, steps

pytestmark = pytest.mark.wide
ROOT = Path(__file__).parents[2]


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=patience.HANG_S,
        cwd=folder,
        env=environ,
        check=False,
    )


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install `.[server]` into a new environment and return the folder of its commands."""
    folder = tmp_path_factory.mktemp("without-torch")
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder).check_returncode()
    python = folder / "venv" / "bin" / "python"
    pip = run(python, "-m", "pip", "install", "-q", "--no-compile", f"{ROOT}[server]", folder=folder)
    if pip.returncode:
        reason = f"pip install '.[server]' failed: {pip.stderr[-2000:]}"
        # A missing package index is a fact about the machine; on CI it is a failure.
        if os.environ.get("CI") == "true" or "No matching distribution" not in pip.stderr:
            pytest.fail(reason)
        pytest.skip(reason)
    return python.parent


@pytest.mark.timeout(480)
def test_the_package_and_the_wire_import_without_torch(bin_folder: Path, tmp_path: Path) -> None:
    code = "import ddpobs, ddpobs.wire, ddpobs_server.app, sys; assert 'torch' not in sys.modules; import torch"
    imported = run(bin_folder / "python", "-c", code, folder=tmp_path)
    assert imported.returncode == 1
    assert imported.stderr.strip().endswith("ModuleNotFoundError: No module named 'torch'")


@pytest.mark.timeout(480)
def test_the_installed_collector_stores_and_reports_a_run_without_torch(bin_folder: Path, tmp_path: Path) -> None:
    with collector(tmp_path, command=[str(bin_folder / "ddpobs-server")]) as running:
        assert put(running.url, batch("bare", steps=steps(0, 5), spans=spans(0, 5))).status_code == 201
        assert get(running.url, "/runs/bare")["steps"] == 5
        assert "missing" in get(running.url, "/runs/bare/diagnostics")
        for path in ("/", "/docs", "/metrics", "/runs/bare"):
            assert httpx.get(running.url + path).status_code == 200, path
