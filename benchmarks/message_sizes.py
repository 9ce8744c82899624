"""Measure an all-reduce by the size of its message: time and bus bandwidth, over gloo and over MPI.

    mpiexec -n 2 python -m benchmarks.message_sizes [--rounds 5] [--json FILE]

Both backends run in turns in the same processes, one thread each, on one host. MPI is the library that mpiexec belongs
to. A round calls the all-reduce several times, one after the other, and takes their mean time; the table has the median
of the rounds and the fastest round. Bus bandwidth is `bytes / time * 2 (n - 1) / n`, as in nccl-tests.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import ddpobs.mpi
from benchmarks.source import facts

SIZES_BYTES = (4, 4096, 65536, 2**20, 4 * 2**20, 25 * 2**20)
ROUND_BYTES, MAX_CALLS = 50 * 2**20, 50


def measure(group: Any, size_bytes: int) -> float:
    """Return the mean time of an all-reduce, in seconds, of one round."""
    tensor = torch.zeros(size_bytes // 4)
    calls = max(2, min(MAX_CALLS, ROUND_BYTES // size_bytes))
    dist.all_reduce(tensor, group=group)
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return (time.perf_counter() - began) / calls


def table(seconds: dict[str, dict[int, list[float]]], ranks: int) -> str:
    """Return a row for each size, with the median and the fastest time and the bandwidth of the median."""
    names = list(seconds)
    lines = [f"| bytes | {' | '.join(f'{name}, µs | GB/s' for name in names)} |", "|---" * (1 + 2 * len(names)) + "|"]
    for size_bytes in SIZES_BYTES:
        cells = []
        for name in names:
            times = seconds[name][size_bytes]
            bandwidth = size_bytes / float(np.median(times)) * 2 * (ranks - 1) / ranks / 1e9
            cells.append(f"{np.median(times) * 1e6:,.0f} ({min(times) * 1e6:,.0f}) | {bandwidth:.3f}")
        lines.append(f"| {size_bytes:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the measurements")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(ddpobs.mpi.BACKEND)
    library = " ".join(MPI.Get_library_version().split(",")[0].split()[:3]).removesuffix(" MPICH")
    groups = {"gloo": dist.new_group(backend="gloo"), library: None}
    seconds: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES_BYTES} for name in groups}
    for _ in range(options.rounds):
        for size_bytes in SIZES_BYTES:
            for name, group in groups.items():
                dist.barrier(group=group)
                seconds[name][size_bytes].append(measure(group, size_bytes))
    if dist.get_rank() == 0:
        print(table(seconds, dist.get_world_size()))
        load = os.getloadavg()[0]
        print(f"load of the machine at the end: {load:.1f} on {os.cpu_count()} cores")
        if options.json:
            results = {**facts("ddpobs/mpi", "benchmarks/message_sizes.py"), "load": load, "seconds": seconds}
            options.json.write_text(json.dumps(results) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
