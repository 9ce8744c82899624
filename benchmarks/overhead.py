"""Step time of ours with telemetry, ours without, and torch's DDP, interleaved in one run of two gloo ranks.

    python benchmarks/overhead.py [--rounds 60] [--json FILE]

Every variant trains its own copy of the model in the same processes; a round runs each variant for a few steps, in an
order drawn anew. Printed are the medians and each variant's ratio to torch's default, with a 95 % interval from
resampled rounds. The A/A pair is torch's default a second time: how far it is from 1 is the noise.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel, TelemetryConfig

STEPS_A_ROUND = 4
BASE = "torch"


def tiny() -> tuple[nn.Module, torch.Tensor]:
    """400 tiny parameters."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(200))), torch.randn(8, 16)


def wide() -> tuple[nn.Module, torch.Tensor]:
    """A wide MLP: 12.6 M parameters in six layers."""
    return nn.Sequential(*(nn.Linear(1448, 1448) for _ in range(6))), torch.randn(32, 1448)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Four encoder layers of width 256."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(4, 64, 256)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "400 tiny parameters": tiny,
    "wide MLP": wide,
    "transformer": transformer,
}


def variants(model: Callable[[], nn.Module]) -> dict[str, Callable[[], Any]]:
    """How to build each variant; telemetry goes to a port where nobody listens, and so to the spool."""
    config = TelemetryConfig(collector="http://127.0.0.1:9", spool=Path(tempfile.mkdtemp()))
    return {
        BASE: lambda: TorchDDP(model()),
        "torch again (A/A)": lambda: TorchDDP(model()),
        "torch, gradient_as_bucket_view": lambda: TorchDDP(model(), gradient_as_bucket_view=True),
        "ours, telemetry off": lambda: DistributedDataParallel(model(), telemetry=False),
        "ours, telemetry on": lambda: DistributedDataParallel(model(), telemetry=config),
    }


def rank_main(rank: int, store: str, name: str, rounds: int, out: str) -> None:
    """Train all variants of one model; rank 0 writes seconds a step, shape [rounds], by variant."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name]()[0]

    batch = MODELS[name]()[1]
    built = {variant: build() for variant, build in variants(model).items()}
    optimizers = {variant: torch.optim.SGD(ddp.parameters(), lr=1e-4) for variant, ddp in built.items()}
    seconds: dict[str, list[float]] = {variant: [] for variant in built}
    order = random.Random(0)
    for number in range(rounds + 3):
        for variant in order.sample(list(built), len(built)):
            took = _steps(built[variant], optimizers[variant], batch)
            if number >= 3:
                seconds[variant].append(took)
    if rank == 0:
        Path(out).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _steps(ddp: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS_A_ROUND):
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()
        optimizer.step()
    return (time.perf_counter() - began) / STEPS_A_ROUND


def ratio(seconds: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median of the rounds' ratios, with a 95 % interval from resampled rounds."""
    ratios = np.array(seconds) / np.array(base)
    draws = np.random.default_rng(0).choice(ratios, (1000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def main() -> None:
    """Print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "seconds.json"
            spawn(rank_main, (f"{folder}/store", name, options.rounds, str(out)), nprocs=2)
            seconds = json.loads(out.read_text())
        print(f"\n{name}, 2 ranks, {options.rounds} rounds of {STEPS_A_ROUND} steps")
        results[name] = {}
        for variant, values in seconds.items():
            middle, low, high = ratio(values, seconds[BASE])
            median_ms = 1e3 * float(np.median(values))
            results[name][variant] = {"median_ms": median_ms, "ratio": middle, "interval": [low, high]}
            print(f"  {variant:32} {median_ms:8.2f} ms   x {middle:.3f}  [{low:.3f}, {high:.3f}]")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
