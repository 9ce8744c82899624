"""Trainings and collectives over MPI: one launch of two ranks, whose second rank fails at the end."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
import ddpobs.horovod as hvd
from ddpobs import DistributedDataParallel, wire
from ddpobs.errors import MpiError
from tests.support.distributed.compare import CAP, batch, net, train, verdicts
from tests.support.distributed.equality import CAPS, equal_after_accumulation, unused_error
from tests.support.distributed.equality import differences as differences_from_torch
from tests.support.distributed.horovod import alone as train_alone
from tests.support.distributed.horovod import together as train_together
from tests.support.distributed.joins import CASES as JOIN_CASES
from tests.support.distributed.mismatches import CASES, check, collect
from tests.support.distributed.sent import sending
from tests.support.distributed.strategies import STRATEGIES
from tests.support.mpi import cases
from tests.support.mpi.launch import start

pytestmark = pytest.mark.timeout(600)
Launch = tuple[list[dict[str, Any]], int, str]
STEPS = 4
MISMATCHES = {
    name: CASES[name]
    for name in ("allreduce dtype", "allreduce shape", "broadcast root", "allgather columns", "two names", "barrier")
}
LATE_S = 1.0
"""Delay of the second rank at the start."""
ERROR = "the second rank gives up"


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Each rank's results, the launcher's exit status, and its output."""
    folder = tmp_path_factory.mktemp("mpi")
    done = start(2, ["-m", "tests.mpi.test_mpi", str(folder)], 500)
    files = [folder / "0", folder / "1"]
    assert all(file.exists() for file in files), done.stdout + done.stderr
    return [pickle.loads(file.read_bytes()) for file in files], done.returncode, done.stdout + done.stderr


def run(folder: Path) -> None:
    """Run all parts on one rank of MPI."""
    import ddpobs.mpi

    torch.set_num_threads(1)
    results: dict[str, Any] = {"refused": refusal()}
    if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
        time.sleep(LATE_S)
    began_s = time.process_time()
    dist.init_process_group(ddpobs.mpi.BACKEND, timeout=timedelta(seconds=60))
    results["processor"] = time.process_time() - began_s
    rank = dist.get_rank()
    results["collectives"] = differences(rank)
    results["only in MPI"] = without_gloo(rank)
    results["groups"] = groups(rank)
    results["trainings"] = trainings(rank)
    results["join"] = verdicts(JOIN_CASES, rank)
    results["horovod"] = horovods(rank)
    results["mismatches"] = mismatches(rank)
    results["telemetry"] = recorded(rank)
    results["blocked"] = blocked()
    results["timeout"] = timeout(rank)
    (folder / "new").mkdir(exist_ok=True)
    (folder / "new" / f"{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    (folder / "new" / f"{rank}").rename(folder / f"{rank}")
    if rank == 1:
        raise RuntimeError(ERROR)
    dist.all_reduce(torch.ones(1))  # Until MPI ends the job.


def refusal() -> str:
    try:
        dist.init_process_group("mpi")
    except MpiError as error:
        return str(error)
    return "none"


def differences(rank: int) -> list[str]:
    """Names of the calls that give other results over MPI than over gloo."""
    gloo = dist.new_group(backend="gloo")
    calls = [(dtype, name, call) for dtype in cases.DTYPES for name, call in cases.EVERY_DTYPE.items()]
    calls += [(torch.float32, name, call) for name, call in cases.OF_FLOATS.items()]
    calls += [(torch.bfloat16, name, call) for name, call in cases.OF_FLOATS.items() if "RedOp" in name]
    calls += [(torch.int32, name, call) for name, call in cases.OF_INTEGERS.items()]
    different = []
    for dtype, name, call in calls:
        # gloo does not move every dtype. The numbers are exact in each of them, and bits need integers.
        exact = torch.int64 if ".B" in name else torch.float64
        theirs = call(gloo, cases.values(rank, dtype).real.to(exact).contiguous())
        ours = call(None, cases.values(rank, dtype))
        if _plain(ours, dtype) != _plain(theirs, dtype):
            different.append(f"{name} of {dtype}: {ours} instead of {theirs}")
    return different


def _plain(value: Any, dtype: torch.dtype) -> Any:
    """Numbers of a result; over gloo, those of a complex tensor's real part."""
    if isinstance(value, torch.Tensor):
        factor = (1 + 1j) if dtype.is_complex and not value.is_complex() else 1
        return (value * factor).to(dtype).tolist()
    return [_plain(item, dtype) for item in value] if isinstance(value, list) else value


def without_gloo(rank: int) -> dict[str, Any]:
    """Collectives that gloo does not have in every version of torch."""
    mean, tensor = cases.values(rank, torch.float32), cases.values(rank, torch.float32)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    part, joined, listed = torch.zeros(6), torch.zeros(24), torch.zeros(6)
    dist.reduce_scatter_single(part, tensor)
    dist.all_gather_single(joined, tensor)
    dist.reduce_scatter(listed, list(tensor.split(6)))
    indices = torch.tensor([[rank, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([[1.0, 2.0], [1.0 - 2 * rank, 0.0]]), (4, 2))
    dist.all_reduce(sparse)
    sparse = sparse.coalesce()
    return {
        "mean": mean.tolist(),
        "part": part.tolist(),
        "listed": listed.tolist(),
        "joined": joined.tolist(),
        "sparse": [sparse.indices().tolist(), sparse.values().tolist()],
    }


def groups(rank: int) -> list[Any]:
    """For a group of this rank alone and for one of both: a sum, the rank in the group, the group's backend."""
    alone = [dist.new_group([index]) for index in range(2)][rank]
    sums = []
    for group in (alone, dist.new_group([0, 1])):
        tensor = torch.ones(3) * (rank + 1)
        dist.all_reduce(tensor, group=group)
        sums.append([float(tensor[0]), dist.get_rank(group), dist.get_backend(group)])
    dist.destroy_process_group(alone)
    return sums


def trainings(rank: int) -> dict[str, Any]:
    """Trainings of the tests over gloo, and the same over both backends."""
    gloo = dist.new_group(backend="gloo")
    caps = CAPS
    results: dict[str, Any] = {
        "as torch's": differences_from_torch(rank, 2, "cnn", caps | {"find_unused_parameters": True}),
        "accumulated": equal_after_accumulation(rank, 2),
        "unused": unused_error(rank, 2),
    }
    for strategy in STRATEGIES:
        both = [
            train(DistributedDataParallel(net(), comm=strategy, process_group=group, **CAP), rank, steps=12)
            for group in (None, gloo)
        ]
        results[strategy] = all(map(torch.equal, *both))
    both = [train(TorchDDP(net(), process_group=group), rank) for group in (None, gloo)]
    results["torch's DDP"] = all(map(torch.equal, *both))
    return results


def horovods(rank: int) -> list[Any]:
    hvd.init()
    alone, together = net(), net()
    train_alone(alone, 2, 3)
    train_together(together, rank, 3)
    equal = all(map(torch.equal, alone.parameters(), together.parameters()))
    position = [
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.mpi_built() and hvd.mpi_enabled() and hvd.mpi_threads_supported(),
        float(hvd.allreduce(torch.tensor(rank + 1.0))),
    ]
    hvd.shutdown()
    return [equal, *position]


def mismatches(rank: int) -> dict[str, str]:
    hvd.init()
    found = collect(MISMATCHES, rank, 2)
    hvd.shutdown()
    return found


def recorded(rank: int) -> dict[str, Any]:
    """Telemetry of both DDPs over MPI and over gloo, with a collective of the user's in each step."""
    results: dict[str, Any] = {}
    for group, kind in product((None, dist.new_group(backend="gloo")), (DistributedDataParallel, TorchDDP)):
        with sending() as records:
            arguments: dict[str, Any] = {"telemetry": records.config} if kind is DistributedDataParallel else {}
            ddp = kind(nn.Sequential(net(), nn.BatchNorm1d(2)), bucket_cap_mb=0.05, process_group=group, **arguments)
            if kind is TorchDDP:
                ddpobs.attach(ddp, records.config)
            for step in range(STEPS):
                ddp(batch(rank, step)).pow(2).mean().backward()
                dist.all_reduce(torch.ones(1), group=group)
        launched, done = records.spans("launched_ns"), records.spans("done_ns")
        (backend,) = {batch.hello.backend for batch in records.batches if batch.hello}
        results[f"{kind.__module__} over {backend}"] = {
            "spans": len(done),
            "in order": all(0 < begin < end for begin, end in zip(launched, done, strict=True)),
            "steps": len(records.steps("step")),
            "comms": sorted(wire.COMM_KINDS[kind] for kind in records.comms("kind")),
        }
    return results


def blocked() -> list[str]:
    """Log lines of a call that takes long, and of one that does not."""
    from ddpobs.mpi.blocking import logged_if_long

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddpobs").addHandler(handler)
    with logged_if_long("MPI_Bcast"):
        pass
    with logged_if_long("MPI_Comm_free", after_s=0.02):
        time.sleep(0.2)
    logging.getLogger("ddpobs").removeHandler(handler)
    return lines


def timeout(rank: int) -> list[str]:
    """Errors of a message that never comes, and of the group afterwards."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    errors = []
    for _ in range(2):
        try:
            dist.recv(torch.zeros(1), 1 - rank, group=group)
        except dist.DistBackendError as error:
            errors.append(str(error))
    return errors


def test_every_collective_gives_the_results_of_gloo_in_every_dtype(launch: Launch) -> None:
    assert [rank["collectives"] for rank in launch[0]] == [[], []]


def test_collectives_that_gloo_lacks_have_the_right_results(launch: Launch) -> None:
    total = [3.0, 5.0, 7.0, 9.0, 11.0] * 2 + [3.0, 5.0]
    joined = [float(number) for rank in range(2) for number in cases.values(rank, torch.float32)]
    for rank, results in enumerate(rank["only in MPI"] for rank in launch[0]):
        assert results["mean"] == [number / 2 for number in total]
        assert results["part"] == results["listed"] == total[6 * rank : 6 * rank + 6]
        assert results["joined"] == joined
        # Row 2 adds up to zero on both ranks, and stays a row of the result.
        assert results["sparse"] == [[[0, 1, 2]], [[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]]


def test_a_rank_that_waits_for_a_late_one_leaves_the_processor_to_it(launch: Launch) -> None:
    assert launch[0][0]["processor"] < LATE_S / 2


def test_groups_have_their_own_ranks(launch: Launch) -> None:
    for rank, results in enumerate(rank["groups"] for rank in launch[0]):
        assert results == [[rank + 1.0, 0, "ddpobs_mpi"], [3.0, rank, "ddpobs_mpi"]]


def test_trainings_equal_those_of_torch_and_of_gloo(launch: Launch) -> None:
    for rank in launch[0]:
        results = rank["trainings"]
        assert all(equal for equal, _ in results.pop("as torch's"))
        assert results.pop("unused").startswith("UnusedParametersError")
        assert set(results.values()) == {True}, results


def test_uneven_inputs_train_under_join_as_with_torchs_ddp(launch: Launch) -> None:
    for rank in launch[0]:
        assert rank["join"] == dict.fromkeys(JOIN_CASES, "equal")


def test_horovods_optimizer_trains_over_mpi(launch: Launch) -> None:
    for rank, results in enumerate(rank["horovod"] for rank in launch[0]):
        assert results == [True, rank, 2, rank, True, 1.5]


def test_ranks_that_call_different_collectives_raise_one_error(launch: Launch) -> None:
    check(MISMATCHES, [rank["mismatches"] for rank in launch[0]])


def test_telemetry_records_what_it_records_over_gloo(launch: Launch) -> None:
    for rank in launch[0]:
        results = rank["telemetry"]
        for module in ("ddpobs.ddp", "torch.nn.parallel.distributed"):
            assert results[f"{module} over ddpobs_mpi"] == results[f"{module} over gloo"]
            assert (
                results[f"{module} over ddpobs_mpi"]["comms"].count("user") >= STEPS - 1
            )  # The last may have no step.
        assert all(recorded["in order"] and recorded["spans"] >= STEPS for recorded in results.values())


def test_a_message_that_never_comes_times_out_and_ends_its_group(launch: Launch) -> None:
    for rank in launch[0]:
        first, second = rank["timeout"]
        assert first == "Timed out waiting 300ms for recv over MPI to complete"
        assert second.startswith("this process group cannot go on after an error: Timed out")


def test_a_call_that_blocks_for_long_is_in_the_log(launch: Launch) -> None:
    for rank in launch[0]:
        (line,) = rank["blocked"]
        assert "waited 0 s in MPI_Comm_free for the other ranks" in line


def test_an_error_on_one_rank_ends_the_job(launch: Launch) -> None:
    _, status, output = launch
    assert status != 0
    assert ERROR in output


def test_torchs_own_name_is_refused_with_the_name_to_use(launch: Launch) -> None:
    assert 'init_process_group("ddpobs_mpi")' in launch[0][0]["refused"]


if __name__ == "__main__":
    run(Path(sys.argv[1]))
