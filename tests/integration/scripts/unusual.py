"""Unusual trainings that are right: `unusual.py CASE STEPS`.

The door is `$DOOR`: `ours`, `attach`, or empty for torch's own DDP.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digest import report
from doors import wait_for_name
from torch import nn

import ddpobs

STEPS = int(sys.argv[2])
DOOR = os.environ.get("DOOR")
if DOOR == "ours":
    from ddpobs import DistributedDataParallel
else:
    from torch.nn.parallel import DistributedDataParallel  # type: ignore[assignment]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def wrapped(model: nn.Module) -> Any:
    ddp: Any = DistributedDataParallel(model)
    if DOOR == "attach":
        ddpobs.attach(ddp)
    return ddp


def batches(count: int, rows: Callable[[int], int] = lambda _: 4) -> Iterator[torch.Tensor]:
    """Batches that differ between the ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for index in range(count):
        yield torch.randn(rows(index), 16, generator=generator)


def train(ddp: Any, optimizer: Any, count: int = STEPS) -> Iterator[int]:
    """Train, and yield the number of each step after it."""
    for index, batch in enumerate(batches(count)):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        yield index


def signals() -> nn.Module:
    """SIGUSR1 saves a checkpoint at once; SIGTERM ends the training in order, on all ranks after the same step."""
    model = network()
    ddp, saved, stopped = wrapped(model), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal.signal(signal.SIGUSR1, lambda *_: saved.append(model.state_dict()))
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    for index in train(ddp, optimizer, 10 * STEPS):
        if index == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        if index == STEPS - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if stopped:
            break
    assert len(saved) == 1
    return model


def out_of_memory() -> nn.Module:
    """A batch is too long: for rank 1, which takes an empty one in its place, and later for both, which skip it."""
    model = network()
    ddp, fits = wrapped(model), 16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refuse(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs[0]) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    model[1].register_forward_pre_hook(refuse)  # type: ignore[index]
    rank = dist.get_rank()
    for batch in batches(STEPS + 1, lambda index: 32 if index == 12 or (index == 7 and rank == 1) else 4):
        optimizer.zero_grad()
        try:
            loss, is_skipped = ddp(batch).square().mean(), False
        except torch.OutOfMemoryError:
            is_skipped = True
        skipping = torch.tensor(float(is_skipped))
        dist.all_reduce(skipping)
        if skipping == dist.get_world_size():
            continue
        if is_skipped:
            loss = 0 * ddp(batch[:1]).sum()
        loss.backward()
        optimizer.step()
    return model


class Owned(torch.optim.Optimizer):
    """Each rank orthogonalises the gradients of its own parameters, as Muon does, and sends them to the others."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            owner = index % dist.get_world_size()
            update = torch.empty_like(parameter)
            if dist.get_rank() == owner:
                update = parameter.grad / (parameter.grad.norm() + 1e-7)
                for _ in range(3 if update.ndim == 2 else 0):
                    update = 1.5 * update - 0.5 * update @ update.T @ update
            dist.broadcast(update, owner)
            parameter.sub_(self.param_groups[0]["lr"] * update)


def owners() -> nn.Module:
    model = network()
    ddp = wrapped(model)
    for _ in train(ddp, Owned(model.parameters())):
        pass
    return model


def packing() -> nn.Module:
    """Sequences are packed into micro-batches, of which the ranks have different numbers in each step."""
    model = network()
    model[1].register_forward_pre_hook(lambda *_: time.sleep(0.004))  # type: ignore[index]
    ddp, rank = wrapped(model), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index in range(STEPS):
        optimizer.zero_grad()
        count = 1 + (3 * index + 2 * rank) % 4
        for micro, batch in enumerate(batches(count)):
            with ddp.no_sync() if micro < count - 1 else nullcontext():
                (ddp(batch).square().mean() / count).backward()
        optimizer.step()
    return model


def trials() -> nn.Module:
    """Three trials in one process, each with a model of its own; the last has a group of its own too."""
    for trial in range(3):
        model = network(trial)
        ddp = wrapped(model)
        for _ in train(ddp, torch.optim.SGD(model.parameters(), lr=0.1 / (trial + 1))):
            pass
        del ddp
    return model


def ppo() -> nn.Module:
    """Rollouts in evaluation mode, each followed by epochs of updates; actor and critic are one module."""
    model = network()
    ddp = wrapped(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS // 4):
        states = torch.randn(8, 16, generator=generator)
        ddp.eval()
        for _ in range(4):
            with torch.no_grad():
                actions = ddp.module(states)
            states = states + 0.1 * torch.cat([actions] * 4, 1)
            time.sleep(0.02)  # The environment answers.
        ddp.train()
        for _ in range(2):
            for part in states.split(4):
                optimizer.zero_grad()
                ddp(part).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
    return model


def smaller_world() -> nn.Module:
    """Rank 1 is killed; the next start, with fewer ranks, has a checkpoint."""
    model, checkpoint = network(), Path(os.environ["FOLDER"]) / "checkpoint.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = STEPS // 2
    for index in train(wrapped(model), optimizer, STEPS - first):
        if first == 0 and index == STEPS // 2 - 1:
            wait_for_name()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "signals": signals,
    "out-of-memory": out_of_memory,
    "owners": owners,
    "packing": packing,
    "trials": trials,
    "ppo": ppo,
    "smaller-world": smaller_world,
}


def main(case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = CASES[case]()
    report(dist.get_rank(), model)
    wait_for_name()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
