"""A training of one variant on one rank: `python training.py '{"model": …, "variant": …, "steps": …}'`.

The first rank writes `result.json` to `$OUT`: seconds of forward, backward, optimizer and the whole step, for each step
after the warm-up, the peak of the process's memory, and what of it came with the training.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.paper.experiments import Variant
from benchmarks.paper.models import PAPER_MODELS
from ddpobs import DistributedDataParallel

_WARM_UP = 3
"""Steps before the measurement: buckets are rebuilt after the first."""


class _WithUnused(nn.Module):
    """A module with a layer that its result does not depend on: an eighth more parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.unused = nn.Linear(1, sum(parameter.numel() for parameter in module.parameters()) // 16)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the module alone."""
        return self.module(*inputs)


def _wrapped(module: nn.Module, variant: Variant) -> nn.Module:
    if variant.torch:
        return TorchDDP(module, bucket_cap_mb=variant.cap_mb, find_unused_parameters=variant.finds_unused)
    return DistributedDataParallel(
        module,
        bucket_cap_mb=variant.cap_mb,
        find_unused_parameters=variant.finds_unused,
        comm=variant.comm,
        round_robin_groups=variant.groups,
        telemetry=variant.predicts,
    )


def train(model: str, variant: Variant, steps: int) -> dict[str, Any]:
    """Train; return the seconds of each step's parts, shape [steps, 4], the peak of memory and its growth in MB."""
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before_mb = pages * resource.getpagesize() / 1e6
    torch.manual_seed(0)
    measured = PAPER_MODELS[model]
    module = measured.build()
    wrapped: Any = _wrapped(_WithUnused(module) if variant.has_unused else module, variant)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-5)
    batch = measured.batch()
    seconds = []
    for _ in range(_WARM_UP + steps):
        forward_s = backward_s = 0.0
        began_s = time.perf_counter()
        for number in range(variant.batches):
            reduces = variant.synchronises and number == variant.batches - 1
            with nullcontext() if reduces else wrapped.no_sync():
                forward_began_s = time.perf_counter()
                loss = measured.loss(wrapped(*batch))
                backward_began_s = time.perf_counter()
                loss.backward()
            forward_s += backward_began_s - forward_began_s
            backward_s += time.perf_counter() - backward_began_s
        optimizer_began_s = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        ended_s = time.perf_counter()
        seconds.append([forward_s, backward_s, ended_s - optimizer_began_s, ended_s - began_s])
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {
        "seconds": [[round(part, 6) for part in step] for step in seconds[_WARM_UP:]],
        "peak_mb": round(peak_mb, 1),
        "growth_mb": round(peak_mb - before_mb, 1),
    }


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    trained = Variant(**options["variant"])
    if trained.mpi:
        import ddpobs.mpi  # Initializes MPI.

        dist.init_process_group(ddpobs.mpi.BACKEND)
    else:
        dist.init_process_group("gloo")
    result = train(options["model"], trained, options["steps"])
    if dist.get_rank() == 0:
        Path(os.environ["OUT"], "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
