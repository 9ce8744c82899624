"""The wheel, built from the sdist, holds every file and works outside of the source tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ddpobs

ROOT = Path(__file__).resolve().parents[2]
SMOKE = """
import sys
sys.path.insert(0, sys.argv[1])
import ddpobs, ddpobs.wire, ddpobs_server.app
from ddpobs.cli import main
assert ddpobs.__file__.startswith(sys.argv[1]), ddpobs.__file__
assert ddpobs_server.app.__file__.startswith(sys.argv[1]), ddpobs_server.app.__file__
assert "torch" not in sys.modules
main(["--help"])
"""


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, folder=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    options = ("-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, sdist, folder=folder)
    (built,) = folder.glob("*.whl")
    return built


def tracked(folder: str) -> set[str]:
    """Files of a folder that belong to the project."""
    paths = (ROOT / folder).rglob("*")
    return {str(path.relative_to(ROOT)) for path in paths if path.is_file() and "__pycache__" not in path.parts}


OTHER_HELP = {
    "docs/concepts.md",
    "docs/operations/monitoring.md",
    "docs/operations/retention.md",
    "docs/reference/alerts.md",
}


def test_the_wheel_holds_both_packages_whole_and_the_help_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    server = {name.removeprefix("server/") for name in tracked("server/ddpobs_server")}
    pages = {f"ddpobs_server/page/help_pages/{Path(name).name}" for name in tracked("docs/findings") | OTHER_HELP}
    assert names == tracked("ddpobs") | server | pages
    assert {"ddpobs/py.typed", "ddpobs_server/py.typed", "ddpobs_server/page/static/run.html"} <= names


def test_the_wheel_imports_and_runs_its_command_outside_of_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    output = run(sys.executable, "-I", "-c", SMOKE, tmp_path, folder=tmp_path)
    assert "Run a training with telemetry." in output


def test_dir_lists_the_public_names_alone() -> None:
    assert dir(ddpobs) == [
        "Client",
        "DistributedDataParallel",
        "LayerDrop",
        "TelemetryConfig",
        "__version__",
        "attach",
        "current_run",
        "trackers",
    ]
    assert sorted(ddpobs.__all__) == dir(ddpobs)
    assert all(hasattr(ddpobs, name) for name in dir(ddpobs))
