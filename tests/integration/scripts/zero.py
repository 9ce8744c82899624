"""Trains with DeepSpeed: `zero.py STAGE [FAULT] [STEPS]`. The faults are real work, or a real wait, on rank 1.

`slow-backward` works longer in the backward of the second block. In step 5 `hang` stops before the forward. The process
group is left to the exit, as by scripts for DeepSpeed.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

STAGE, FAULT, STEPS = int(sys.argv[1]), [*sys.argv[2:], ""][0], int([*sys.argv[3:], "60"][0])
WIDTH, ROWS, FAULTY_STEP = 96, 64, 5
DIVIDED = {"stage3_param_persistence_threshold": 0}
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": STAGE, "reduce_bucket_size": 2 * WIDTH * WIDTH, **DIVIDED},
}


class Extra(torch.autograd.Function):
    """Passes values and gradients through, with additional work in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        matrix = torch.randn(160, 160)
        for _ in range(150):
            matrix = torch.tanh(matrix @ matrix)
        return gradients[0]


class Block(nn.Module):
    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.slow = slow
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.slow:
            values = Extra.apply(values)  # type: ignore[no-untyped-call]
        return self.inner(values)  # type: ignore[no-any-return]


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = {}  # Nothing is compiled.
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(slow=FAULT == "slow-backward" and rank == 1 and index == 1) for index in range(3)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    if "ATTACH" in os.environ:
        import ddpobs

        ddpobs.attach(engine, telemetry=None)
    for step in range(STEPS):
        if FAULT == "hang" and rank == 1 and step == FAULTY_STEP:
            time.sleep(3600)
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
        engine.backward(engine(batch).pow(2).mean())
        engine.step()


if __name__ == "__main__":
    main()
