"""Runs a function on ranks that mpiexec starts.

On each rank, `python -m tests.support.mpi.launch FOLDER` runs this file.

With `DDPOBS_TEST_MPI=1` all tests that call `run_ranks` run so.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.rig import patience

ROOT = Path(__file__).resolve().parents[3]
AS_ROOT_ON_FEW_CORES = {
    f"{name}_ALLOW_RUN_AS_ROOT{suffix}": "1" for name in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")
} | {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
"""Settings of Open MPI, which MPICH does not read."""


def mpiexec() -> str:
    """The launcher of the MPI that is installed beside this Python, or else of the system."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"


def start(ranks: int, command: list[str], timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND…` on ranks of MPI, and return the launcher's result."""
    return patience.run(
        [mpiexec(), "-n", str(ranks), sys.executable, *command],
        environ=os.environ | AS_ROOT_ON_FEW_CORES | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path()} | environment,
        timeout_s=timeout_s,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )


def run_over_mpi(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = patience.HANG_S
) -> list[Any]:
    """As `tests.support.distributed.launch.run_ranks`, over the backend ddpobs_mpi."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((function, args)))
        result = start(world_size, ["-m", "tests.support.mpi.launch", name], timeout_s)
        answers = [folder / f"{rank}" for rank in range(world_size)]
        assert all(path.exists() for path in answers), result.stdout + result.stderr
        values = [pickle.loads(path.read_bytes()) for path in answers]
    failed = [value for ok, value in values if not ok]
    assert not failed, "\n".join(failed)
    assert result.returncode == 0, result.stdout + result.stderr
    return [value for _, value in values]


def _path() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "server"), *filter(None, [os.environ.get("PYTHONPATH")])])


def _rank(folder: Path) -> None:
    function, args = pickle.loads((folder / "call").read_bytes())
    import torch
    import torch.distributed as dist

    import ddpobs.mpi

    torch.set_num_threads(1)
    dist.init_process_group(ddpobs.mpi.BACKEND, timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        answer = True, function(rank, size, *args)
    except BaseException:
        answer = False, f"rank {rank}:\n{traceback.format_exc()}"
    (folder / "new").mkdir(exist_ok=True)
    (folder / "new" / f"{rank}").write_bytes(pickle.dumps(answer))
    (folder / "new" / f"{rank}").rename(folder / f"{rank}")
    if not answer[0]:
        raise SystemExit(f"rank {rank} failed")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
