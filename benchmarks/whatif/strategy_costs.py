"""Measure the computation of the strategies in `ddpobs.whatif.strategies`, in ns per byte of float32.

    python -m benchmarks.whatif.strategy_costs [--rounds 40] [--mb 8]

Two gloo processes on this machine exchange a bucket by each strategy in turn. `launch` is the time until the call
returns. `transfer` is the rest of the exchange, beyond the part of float32's exchange that the strategy's bytes take.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.registry import choose
from ddpobs.whatif.strategies import STRATEGY_COSTS

_PLAIN = "all_reduce"


def _exchange_ns(comm: object, bucket: Bucket) -> tuple[float, float]:
    """Return the time of the launch, and of the rest, in ns per byte of the bucket."""
    dist.barrier()
    began = time.perf_counter_ns()
    pending = comm.launch(bucket, last=True)  # type: ignore[attr-defined]
    launched = time.perf_counter_ns()
    pending.wait()
    size_bytes = bucket.elements * bucket.buffer.element_size()
    return (launched - began) / size_bytes, (time.perf_counter_ns() - launched) / size_bytes


def _rank_main(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    parameter = torch.nn.Parameter(torch.zeros(int(options.mb * 2**20 / 4)))
    bucket = Bucket(0, [0], [parameter], sparse=False, as_views=False)
    comms = {name: choose(name, 1)(dist.group.WORLD) for name in STRATEGY_COSTS}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in comms}
    for _ in range(options.rounds):
        for name, comm in comms.items():
            bucket.buffer.normal_()
            times[name].append(_exchange_ns(comm, bucket))
    if rank == 0:
        print(report({name: np.median(values[2:], axis=0) for name, values in times.items()}))
    dist.destroy_process_group()


def report(medians: dict[str, np.ndarray]) -> str:
    """Return a row for each strategy: measured, and what the model has."""
    lines = ["| strategy | launch | transfer | in the model |", "|---|---|---|---|"]
    plain_ns = medians.pop(_PLAIN).sum()
    for name, (launch_ns, rest_ns) in medians.items():
        cost = STRATEGY_COSTS[name]
        beyond_ns = rest_ns - cost.payload * plain_ns
        lines.append(f"| {name} | {launch_ns:.2f} | {beyond_ns:.2f} | {cost.launch_ns}, {cost.transfer_ns} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--mb", type=float, default=8.0, help="size of the bucket")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_rank_main, args=(rank, f"{folder}/store", options)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
