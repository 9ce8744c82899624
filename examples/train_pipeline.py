"""A pipeline made by hand: two ranks with half of the layers each, and messages that overlap with computation.

    torchrun --nproc-per-node 2 examples/train_pipeline.py

A batch goes through in micro-batches. Rank 0 sends the activations of one while it computes the next. Rank 1 sends each
gradient back while it computes the next micro-batch, so that rank 0's backward begins early. Torch's schedules do the
same, with replicas of each stage: see docs/pipelines.md. If `DDPOBS_TELEMETRY` is set to a collector's address, `ddpobs
run` before the command records the steps.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

WIDTH, ROWS, MICRO_BATCHES = 128, 64, 4
SHAPE = ROWS // MICRO_BATCHES, WIDTH


def first_stage(layers: nn.Module, inputs: torch.Tensor) -> None:
    """Compute and send all micro-batches, then go back as the second rank's gradients arrive."""
    gradients = [torch.empty(SHAPE) for _ in range(MICRO_BATCHES)]
    arrivals = [dist.irecv(gradient, 1) for gradient in gradients]
    outputs, sends = [], []
    for rows in inputs.chunk(MICRO_BATCHES):
        outputs.append(layers(rows))
        sends.append(dist.isend(outputs[-1].detach(), 1))
    for output, gradient, arrival in zip(outputs, gradients, arrivals, strict=True):
        _wait(arrival)
        output.backward(gradient)
    for send in sends:
        _wait(send)


def second_stage(layers: nn.Module, targets: torch.Tensor) -> float:
    """Go forward and back through each micro-batch as it arrives; return the mean loss."""
    activations = [torch.empty(SHAPE) for _ in range(MICRO_BATCHES)]
    arrivals = [dist.irecv(activation, 0) for activation in activations]
    total, sends = 0.0, []
    for activation, arrival, rows in zip(activations, arrivals, targets.chunk(MICRO_BATCHES), strict=True):
        _wait(arrival)
        loss = mse_loss(layers(activation.requires_grad_()), rows) / MICRO_BATCHES
        loss.backward()
        assert activation.grad is not None
        sends.append(dist.isend(activation.grad, 0))
        total += loss.item()
    for send in sends:
        _wait(send)
    return total


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
    rank = dist.get_rank()
    if dist.get_world_size() != 2:
        raise SystemExit(f"this pipeline has two stages: expected 2 ranks, got {dist.get_world_size()}")
    torch.manual_seed(rank)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(2)  # Both ranks draw the same batches.
    for step in range(1, arguments.steps + 1):
        inputs = torch.randn(ROWS, WIDTH, generator=batches)
        optimizer.zero_grad()
        if rank == 0:
            first_stage(layers, inputs)
        else:
            loss = second_stage(layers, inputs.sin())
            if step == 1 or step % 20 == 0:
                print(f"step {step:4d}/{arguments.steps}  loss {loss:.4f}", flush=True)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
