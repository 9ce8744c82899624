"""A pipeline made by hand: two stages with half of the layers each, and messages that overlap with computation.

    ddpobs run -- torchrun --nproc-per-node 2 examples/train_pipeline.py

A batch goes through in micro-batches. The first stage sends the activations of one while it computes the next. The
second sends each gradient back while it computes the next micro-batch, so that the first's backward begins early. Each
stage is a DDP over its replicas: one with 2 ranks, two with 4. It is what records the steps. Torch's schedules do the
same: see docs/pipelines.md.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from ddpobs import DistributedDataParallel

WIDTH, ROWS, MICRO_BATCHES = 256, 128, 4
SHAPE = ROWS // MICRO_BATCHES, WIDTH


def first_stage(layers: nn.Module, inputs: torch.Tensor, peer: int) -> None:
    """Compute and send all micro-batches, then go back as the second stage's gradients arrive."""
    gradients = [torch.empty(SHAPE) for _ in range(MICRO_BATCHES)]
    arrivals = [dist.irecv(gradient, peer) for gradient in gradients]
    outputs, sends = [], []
    for number, rows in enumerate(inputs.chunk(MICRO_BATCHES)):
        with _reduces_last(layers, number):
            outputs.append(layers(rows))
        sends.append(dist.isend(outputs[-1].detach(), peer))
    for output, gradient, arrival in zip(outputs, gradients, arrivals, strict=True):
        _wait(arrival)
        output.backward(gradient)
    for send in sends:
        _wait(send)


def second_stage(layers: nn.Module, targets: torch.Tensor, peer: int) -> float:
    """Go forward and back through each micro-batch as it arrives; return the mean loss."""
    activations = [torch.empty(SHAPE) for _ in range(MICRO_BATCHES)]
    arrivals = [dist.irecv(activation, peer) for activation in activations]
    total, sends = 0.0, []
    for number, (activation, arrival) in enumerate(zip(activations, arrivals, strict=True)):
        _wait(arrival)
        with _reduces_last(layers, number):
            loss = mse_loss(layers(activation.requires_grad_()), targets.chunk(MICRO_BATCHES)[number]) / MICRO_BATCHES
            loss.backward()
        assert activation.grad is not None
        sends.append(dist.isend(activation.grad, peer))
        total += loss.item()
    for send in sends:
        _wait(send)
    return total


def _reduces_last(layers: Any, number: int) -> AbstractContextManager[None]:
    """The context of a micro-batch's forward: gradients add up, and the last backward reduces them over replicas."""
    return nullcontext() if number == MICRO_BATCHES - 1 else layers.no_sync()


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def main() -> None:
    """Train, and print the losses from the second rank."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=100)
    arguments, _ = options.parse_known_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replicas = ranks // 2
    if ranks % 2:
        raise SystemExit(f"this pipeline has two stages: expected an even number of ranks, got {ranks}")
    groups = [dist.new_group(list(range(first, first + replicas))) for first in (0, replicas)]
    stage, replica = divmod(rank, replicas)
    peer = (rank + replicas) % ranks
    torch.manual_seed(stage)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    layers = DistributedDataParallel(module, process_group=groups[stage])
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(replica)  # Both stages of a pipeline draw the same batches.
    for step in range(1, arguments.steps + 1):
        inputs = torch.randn(ROWS, WIDTH, generator=batches)
        optimizer.zero_grad()
        if stage == 0:
            first_stage(layers, inputs, peer)
        else:
            loss = second_stage(layers, inputs.sin(), peer)
            if replica == 0 and (step == 1 or step % 20 == 0):
                print(f"step {step:4d}/{arguments.steps}  loss {loss:.4f}", flush=True)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
