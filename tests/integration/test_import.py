"""Traces of torch.profiler, recorded beside live telemetry: the imported run tells what the live one tells."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from benchmarks.rig.training import PATIENT, ROOT, TORCHRUN
from ddpobs import Client, wire
from tests.support.cli import ddpobs
from tests.support.integration.slow_ranks import get, stragglers

pytestmark = pytest.mark.alone

STEPS = 60
SCRIPTS = Path(__file__).parent / "scripts"
LIVE, IMPORTED = "profiled", "imported"
TOLERANCE = 0.01
"""Maximum difference of a phase, as a share of the step."""


def recorded(url: str, folder: Path, run: str, *arguments: str) -> list[Path]:
    """A trace of each rank of a training that reported to the collector."""
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run} | PATIENT
    arguments = (str(folder), str(STEPS), *arguments)
    with ranks_of(SCRIPTS / "profiled.py", *arguments, ranks=2, folder=folder, environ=environ) as ranks:
        ended = [process.wait(patience.HANG_S) for process in ranks.processes]
        assert not any(ended), ranks.logs()
    return [folder / f"rank{rank}.json" for rank in range(2)]


@pytest.fixture(scope="module")
def traces(url: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Traces of a training with DDP."""
    return recorded(url, tmp_path_factory.mktemp("traces"), LIVE)


@pytest.fixture(scope="module")
def said(url: str, traces: list[Path]) -> str:
    """What the command said."""
    done = ddpobs("import", *map(str, traces), "--run", IMPORTED, "--collector", url)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_names_the_rank_that_arrived_last(said: str, url: str) -> None:
    lines = said.splitlines()
    assert lines[0] == f"{STEPS} steps of ranks 0 and 1"
    assert lines[1].startswith("rank 1 arrived last in ")
    assert lines[1].endswith("most of it in other")
    assert lines[-1] == f"{url}/runs/{IMPORTED}"


def test_phases_are_those_of_the_live_run(said: str, url: str) -> None:
    assert_same_phases(url, LIVE, IMPORTED)


def test_phases_and_units_of_a_sharded_training_are_those_of_the_live_run(url: str, tmp_path: Path) -> None:
    files = recorded(url, tmp_path, "live-units", "fsdp2")
    done = ddpobs("import", *map(str, files), "--run", "units", "--collector", url)
    assert done.returncode == 0, done.stderr
    assert "rank 1 arrived last in " in done.stdout
    assert_same_phases(url, "live-units", "units")
    live, imported = (rows_of(url, run) for run in ("live-units", "units"))
    assert imported == live
    (one,), (other,) = stragglers(url, "live-units"), stragglers(url, "units")
    assert (other["ranks"], other["phase"]) == (one["ranks"], one["phase"]) == ([1], "other")


def rows_of(url: str, run: str) -> set[tuple[str, str]]:
    """Unit and kind of each row of a run's layouts."""
    layouts = get(url, run, "/layout")["layouts"]
    return {(bucket["unit"], bucket["kind"]) for layout in layouts for bucket in layout["buckets"]}


def assert_same_phases(url: str, *runs: str) -> None:
    """Compare the second run, an imported one, with the first, step by step."""
    live, imported = (Client(url).run(name) for name in runs)
    for rank in range(2):
        columns = imported.steps(rank=rank)
        first, last = int(columns["step"][1]), int(columns["step"][-2])
        beside = live.steps(rank=rank, first=first, last=last)
        columns = imported.steps(rank=rank, first=first, last=last)
        step_ns = float((columns["end_ns"] - columns["start_ns"]).mean())
        assert columns["step"].tolist() == beside["step"].tolist()
        for phase in (*(f"{name}_ns" for name in wire.PHASES), "own_ns"):
            difference_ns = float(np.median(columns[phase] - beside[phase]))
            assert abs(difference_ns) <= TOLERANCE * step_ns, (rank, phase)


def test_the_same_rank_is_slow_in_the_same_phase(said: str, url: str) -> None:
    (live,), (imported,) = stragglers(url, LIVE), stragglers(url, IMPORTED)
    assert (imported["ranks"], imported["phase"]) == (live["ranks"], live["phase"]) == ([1], "other")


def test_only_the_live_run_tells_of_clocks_and_losses(said: str, url: str) -> None:
    codes = {finding["code"] for finding in get(url, IMPORTED, "/diagnostics")["findings"]}
    assert codes <= {finding["code"] for finding in get(url, LIVE, "/diagnostics")["findings"]}
    assert get(url, IMPORTED)["state"] == "finished"


def test_an_import_repeated_stores_nothing_twice(said: str, url: str, traces: list[Path]) -> None:
    again = ddpobs("import", *map(str, traces), "--run", IMPORTED, "--collector", url)
    assert (again.returncode, again.stdout) == (0, said)
    assert len(get(url, IMPORTED, "/attempts")["attempts"]) == 1
    assert len(get(url, IMPORTED, "/steps")["columns"]["step"]) == 2 * STEPS


def test_a_trace_that_is_cut_off_imports_nothing(url: str, traces: list[Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.json"
    cut.write_bytes(traces[1].read_bytes()[:-2000])
    done = ddpobs("import", str(traces[0]), str(cut), "--run", "cut-off", "--collector", url)
    assert done.returncode == 2
    assert f"{cut}: expected a whole list of events, got" in done.stderr
    assert httpx.get(f"{url}/api/v1/runs/cut-off").status_code == 404


def test_an_exported_run_that_is_imported_has_the_same_answer(said: str, url: str, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{rows}.parquet") for rows in ("steps", "spans")]
    for file, rows in zip(files, ("steps", "spans"), strict=True):
        done = ddpobs("export", LIVE, "-o", file, "--rows", rows, "--collector", url)
        assert done.returncode == 0, done.stderr
    done = ddpobs("import", *files, "--run", "again", "--collector", url)
    assert done.returncode == 0, done.stderr
    for path in ("/steps", "/spans"):
        live, again = (get(url, run, path)["columns"] for run in (LIVE, "again"))
        assert again == live
    (live,), (again,) = stragglers(url, LIVE), stragglers(url, "again")
    for part in ("verdict", "measure", "ranks", "phase", "gain"):
        assert again[part] == live[part], part
    buckets = [get(url, run, "/layout")["layouts"] for run in (LIVE, "again")]
    assert buckets[0] == buckets[1]
    hosts = [[rank["host"] for rank in get(url, run, "/ranks")["ranks"]] for run in (LIVE, "again")]
    assert hosts[0] == hosts[1]


@pytest.mark.parametrize("ending", ["", ".json"])
def test_dumps_of_a_hang_name_the_rank_that_did_not_come(url: str, hang_dumps: Path, ending: str) -> None:
    run, files = f"hang{ending}", [str(hang_dumps / f"nccl_trace_rank_{rank}{ending}") for rank in range(2)]
    done = ddpobs("import", *files, "--run", run, "--collector", url)
    assert done.returncode == 0, done.stderr
    verdict, cause, address = done.stdout.splitlines()
    assert verdict.startswith("The ranks hang in all_reduce ")
    assert verdict.endswith(" of group default_pg, waiting for rank 1")
    assert cause.startswith("cause: rank 1 last called all_reduce ")
    assert ("hang_dump.py:" in cause) == (ending == "")  # JSON has no frames.
    assert address == f"{url}/runs/{run}"
    (finding,) = get(url, run, "/diagnostics")["findings"]
    assert (finding["code"], finding["ranks"], finding["evidence"]["kind"]) == ("hang", [1], "absent")
    assert [finding["verdict"], f"cause: {finding['cause']}"] == [verdict, cause]


@pytest.fixture(scope="module")
def hang_dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the dumps of two ranks that hang."""
    folder = tmp_path_factory.mktemp("dumps")
    environ = dict(os.environ) | {"PYTHONPATH": str(ROOT), "TORCH_FR_BUFFER_SIZE": "100"}
    done = patience.run([*TORCHRUN, SCRIPTS / "hang_dump.py", folder], environ=environ)
    assert done.returncode == 0, done.stderr
    return folder
