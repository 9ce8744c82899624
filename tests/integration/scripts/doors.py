"""Trains a few steps through a door of ddpobs or beside it: `doors.py DOOR [spawn | hvd.run]`.

The script has hooks of its own on all optimizers. With a second argument it starts its two ranks itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rig import patience

STEPS, RANKS, ROWS, WIDTH = 4, 2, 4, 8
COLLECTOR = os.environ.get("COLLECTOR", "")
"""For the doors that name the collector in code."""


def trained(rank: int, model: Any, optimizer: Any, step: Callable[[Any], None]) -> None:
    """Train on batches that differ between the ranks, and print the digest."""
    import torch
    from digest import report

    for number in range(STEPS):
        optimizer.zero_grad()
        step(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(RANKS * number + rank)))
        optimizer.step()
    report(rank, model)
    wait_for_name()


def wait_for_name() -> None:
    """Go on until the ranks agree on the run's name. The store, which they need for it, ends with the process group."""
    import torch.distributed as dist

    telemetry: Any = sys.modules.get("ddpobs.telemetry")
    deadline = time.monotonic() + patience.HANG_S
    while telemetry is not None and telemetry.current_run() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if dist.is_initialized():
        dist.barrier()


def network() -> Any:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    torch.set_num_threads(1)
    torch.manual_seed(0)
    register_optimizer_step_pre_hook(lambda *_: None)
    register_optimizer_step_post_hook(lambda *_: None)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, WIDTH))


def optimizer_of(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model: Any) -> Callable[[Any], None]:
    return lambda batch: model(batch).pow(2).mean().backward()


def connect(rank: int | None) -> int:
    """Create the process group; the rank is given, or one of the launcher's variables."""
    import torch.distributed as dist

    if rank is None and "RANK" in os.environ:
        dist.init_process_group("gloo")
        return dist.get_rank()
    if rank is None:
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    store = Path(os.environ["FOLDER"]) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    return rank


def with_ddp(rank: int | None, door: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddpobs

    rank = connect(rank)
    telemetry = COLLECTOR if door.endswith("in-code") else None
    model = network()
    if door.startswith("ours"):
        ddp: Any = ddpobs.DistributedDataParallel(model, telemetry=telemetry)
    else:
        ddp = DistributedDataParallel(model)
    if door.startswith("attach"):
        ddpobs.attach(ddp, telemetry=telemetry)
    trained(rank, model, optimizer_of(model), backward(ddp))
    dist.destroy_process_group()


def with_torch(rank: int | None, door: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank = connect(rank)
    model = network()
    trained(rank, model, optimizer_of(model), backward(DistributedDataParallel(model)))
    dist.destroy_process_group()


def with_fsdp2(rank: int | None, door: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import ddpobs

    rank = connect(rank)
    model = network()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    if door.endswith("in-code"):
        ddpobs.attach(model, telemetry=COLLECTOR)
    trained(rank, model, optimizer_of(model), backward(model))
    dist.destroy_process_group()


def with_mpi(_: int | None, door: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddpobs.mpi

    dist.init_process_group(ddpobs.mpi.BACKEND)
    model = network()
    ddp: Any = DistributedDataParallel(model)
    if door == "mpi-attach":
        ddpobs.attach(ddp, telemetry=None)
    if door == "mpi-attach-in-code":
        ddpobs.attach(ddp, telemetry=COLLECTOR)
    trained(dist.get_rank(), model, optimizer_of(model), backward(ddp))
    dist.destroy_process_group()


def with_horovod(_: int | None, door: str) -> None:
    import ddpobs.horovod as hvd

    hvd.init()
    model = network()
    optimizer = hvd.DistributedOptimizer(
        optimizer_of(model),
        named_parameters=model.named_parameters(),
        telemetry=COLLECTOR if door.endswith("in-code") else None,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    trained(hvd.rank(), model, optimizer, backward(model))
    hvd.shutdown()


def with_pipeline(rank: int | None, door: str) -> None:
    """A stage per rank, each wrapped in DDP over the rank itself."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.nn.parallel import DistributedDataParallel

    import ddpobs

    rank = connect(rank)
    own = [dist.new_group([member]) for member in range(RANKS)][rank]
    model = network()
    if door.endswith("in-code"):
        ddp: Any = ddpobs.DistributedDataParallel(model, process_group=own, telemetry=COLLECTOR)
    else:
        ddp = DistributedDataParallel(model, process_group=own)
    received, sent = (torch.empty(ROWS // 2, WIDTH, requires_grad=needed) for needed in (rank > 0, True))
    stage = PipelineStage(ddp, rank, RANKS, torch.device("cpu"), input_args=received, output_args=sent)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, _: output.pow(2).mean())

    def step(batch: torch.Tensor) -> None:
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)

    trained(rank, model, optimizer_of(model), step)
    dist.destroy_process_group()


def without_ddp(_: int | None, door: str) -> None:
    import torch

    model = network()
    called = torch.nn.DataParallel(model) if door == "data-parallel" else model
    rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
    trained(rank, model, optimizer_of(model), backward(called))


def without_torch(_: int | None, door: str) -> None:
    sys.stdout.write(f"nothing to train; torch is imported: {'torch' in sys.modules}\n")


DOORS: dict[str, Callable[[int | None, str], None]] = {
    "torch": with_torch,
    **dict.fromkeys(("ours", "ours-in-code", "attach", "attach-in-code"), with_ddp),
    **dict.fromkeys(("fsdp2", "fsdp2-in-code"), with_fsdp2),
    **dict.fromkeys(("horovod", "horovod-in-code"), with_horovod),
    **dict.fromkeys(("mpi", "mpi-attach", "mpi-attach-in-code"), with_mpi),
    **dict.fromkeys(("pipeline", "pipeline-in-code"), with_pipeline),
    **dict.fromkeys(("plain", "data-parallel"), without_ddp),
    "no-torch": without_torch,
}


def ranked(rank: int, door: str) -> None:
    DOORS[door](rank, door)


def main(door: str, start: str = "") -> None:
    if start == "hvd.run":
        import ddpobs.horovod as hvd

        hvd.run(DOORS[door], args=(None, door), np=RANKS)
    elif start == "spawn":
        from torch.multiprocessing.spawn import spawn

        spawn(ranked, (door,), nprocs=RANKS)
    else:
        DOORS[door](None, door)


if __name__ == "__main__":
    main(*sys.argv[1:])
