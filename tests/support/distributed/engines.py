"""Engines of the real DeepSpeed, and their training."""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed.compare import batch

WIDTH = 64
DIVIDED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 4096,
    "reduce_bucket_size": 4096,
    "overlap_comm": True,
}
"""Let stage 3 divide even the small parameters of `model()`, and have several buckets of gradients."""


def find_deepspeed() -> str:
    """Return the folder that the package is in, from which it can be imported then; skip the tests without it."""
    sys.path.append(str(Path(sys.prefix) / "deepspeed"))
    spec = find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("DEEPSPEED WAS NOT TESTED: the package is not installed", allow_module_level=True)
    return str(Path(spec.origin).parents[1])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def engine(stage: int, passes: int = 1, **zero: Any) -> Any:
    """Build an engine on this rank's CPU.

    Args:
        stage: Stage of ZeRO.
        passes: Micro-batches of a step.
        **zero: Further settings of ZeRO.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = {}  # Nothing is compiled.
    module = model()
    built, *_ = deepspeed.initialize(
        model=module,
        model_parameters=module.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": passes,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage, **zero},
        },
    )
    return built


def train_engine(built: Any, rank: int, steps: int, passes: int = 1, direct: bool = False) -> list[float]:
    """Train some steps, and return the losses.

    Args:
        built: The engine.
        rank: Number of the rank, which determines its batches.
        steps: Number of steps.
        passes: Micro-batches of a step.
        direct: Call the loss's own `backward`.
    """
    losses = []
    for number in range(steps * passes):
        loss = built(batch(rank, number)).pow(2).mean()
        if direct:
            loss.backward()
        else:
            built.backward(loss)
        built.step()
        losses.append(loss.item())
    return losses
