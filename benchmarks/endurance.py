"""Measure the remains of 10,000 steps: resident memory, traced memory, threads, open files, and garbage collections.

    python -m benchmarks.endurance [--steps 10000] [--json FILE]

The same small training runs four times: torch's DDP for comparison, ours without telemetry, ours with telemetry and no
collector (so that it fills its spool), and ours with a real collector. The first eleventh of the steps is warm-up.

Tracing costs memory itself, so memory that lines of ddpobs allocated is traced in a second, shorter training. Records
that wait to be sent are released first. Growth is the slope of a line through ten points.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import time
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
from benchmarks.models import Model
from benchmarks.teams import Steps, Team
from benchmarks.variants import VARIANTS as KINDS
from benchmarks.variants import MissingError, Turn
from ddpobs import DistributedDataParallel

TRACED_FLUSH_S = 0.1
BUCKET_MB = 0.002
RANKS = 2

SMALL = Model(
    "20 small parameters in several buckets",
    lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(10))),
    lambda: (torch.randn(8, 16),),
    lambda result: [result],
)


@dataclass(frozen=True)
class Case:
    """A training with torch's DDP or ours, with or without telemetry and a collector."""

    title: str
    ours: bool = False
    telemetry: bool = False
    collector: bool = False

    def wrap(self, module: nn.Module, turn: Turn, traced: bool) -> nn.Module:
        """Wrap the module in its DDP."""
        if not self.ours:
            return TorchDDP(module, bucket_cap_mb=BUCKET_MB)
        config = turn.telemetry()
        if traced:
            config = replace(config, flush_s=TRACED_FLUSH_S)
        return DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB, telemetry=config if self.telemetry else False)


CASES = [
    Case("torch"),
    Case("ours, telemetry off", ours=True),
    Case("ours, telemetry on, no collector", ours=True, telemetry=True),
    Case("ours, telemetry on, a collector", ours=True, telemetry=True, collector=True),
]


def prepare(case: Case, turn: Turn, traced: bool) -> Steps:
    """Return the training. Its note is the process's memory, threads and files after the steps."""
    logging.disable(logging.WARNING)
    if traced:
        tracemalloc.start()
    module = case.wrap(SMALL.build(), turn, traced)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    batch = SMALL.batch()
    collections = Collections()

    def steps(count: int) -> dict[str, int]:
        for _ in range(count):
            optimizer.zero_grad()
            SMALL.loss(module(*batch)).backward()
            optimizer.step()
        if traced:
            time.sleep(3 * TRACED_FLUSH_S)
            gc.collect()
        return footprint_of(traced) | {"collector_ns": collections.took_ns, "full_collections": collections.full}

    return steps


class Collections:
    """Counts and times Python's garbage collections in this process from now on."""

    def __init__(self) -> None:
        self.took_ns = self.full = 0
        self._began_ns = 0
        gc.callbacks.append(self._count)

    def _count(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_ns = time.perf_counter_ns()
        else:
            self.took_ns += time.perf_counter_ns() - self._began_ns
            self.full += info["generation"] == 2


def footprint_of(traced: bool) -> dict[str, int]:
    """Return this process's resident bytes, bytes allocated by lines of ddpobs, threads and open files."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    ddpobs_bytes = 0
    if traced:
        own_lines = tracemalloc.Filter(True, f"{Path(ddpobs.__file__).parent}/*")
        statistics = tracemalloc.take_snapshot().filter_traces([own_lines]).statistics("filename")
        ddpobs_bytes = sum(statistic.size for statistic in statistics)
    return {
        "resident_bytes": resident,
        "ddpobs_bytes": ddpobs_bytes,
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
    }


def run(case: Case, steps: int, legs: int, traced: bool) -> list[dict[str, int]]:
    """Train, and return rank 0's footprint after each leg; the first leg is warm-up."""
    with TemporaryDirectory() as folder:
        turn = Turn(SMALL, 1, RANKS, Path(folder))
        companions = KINDS["collector"].serve(turn) if case.collector else []
        team = Team(RANKS, lambda: prepare(case, turn, traced), companions)
        try:
            footprints = []
            for _ in range(legs + 1):
                team.run(steps // legs)
                footprints.append(team.notes[0])
            return footprints
        finally:
            team.disband()


def summarise(
    footprints: list[dict[str, int]], traced: list[dict[str, int]], leg: int, traced_leg: int
) -> dict[str, Any]:
    """Compute ratios and slopes after warm-up.

    Args:
        footprints: After each leg of `leg` steps.
        traced: The same with traced memory, after each leg of `traced_leg` steps.
        leg: Steps between two footprints.
        traced_leg: Steps between two traced footprints.
    """
    first, last = footprints[1], footprints[-1]
    sizes = [footprint["ddpobs_bytes"] for footprint in traced[1:]]
    slope = float(np.polyfit(np.arange(len(sizes)) * traced_leg, sizes, 1)[0])
    return {
        "resident_ratio": last["resident_bytes"] / first["resident_bytes"],
        "resident_mb": last["resident_bytes"] / 1e6,
        "ddpobs_bytes_a_step": slope,
        "collector_us_a_step": (last["collector_ns"] - first["collector_ns"]) / 1e3 / (leg * (len(footprints) - 2)),
        "full_collections": last["full_collections"] - first["full_collections"],
        "threads": [first["threads"], last["threads"]],
        "open_files": [first["open_files"], last["open_files"]],
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table."""
    lines = [
        "| | resident memory, end over start | ddpobs' own memory, bytes a step | threads | open files | "
        "garbage collector, us a step | full collections |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, row in rows.items():
        threads, files = (" → ".join(map(str, row[name])) for name in ("threads", "open_files"))
        lines.append(
            f"| {title} | {row['resident_ratio']:.4f} of {row['resident_mb']:.0f} MB | "
            f"{row['ddpobs_bytes_a_step']:.1f} | {threads} | {files} | "
            f"{row['collector_us_a_step']:.1f} | {row['full_collections']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--traced-steps", type=int, default=2_000, help="default: %(default)s")
    parser.add_argument("--legs", type=int, default=10, help="points in time, after warm-up; default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.traced_steps, options.legs = 20, 20, 2
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for case in CASES:
        try:
            footprints = run(case, options.steps, options.legs, traced=False)
            traced = run(case, options.traced_steps, options.legs, traced=True)
        except MissingError as reason:
            print(f"not measured: {case.title}: {reason}", flush=True)
            continue
        results[case.title] = summarise(
            footprints, traced, options.steps // options.legs, options.traced_steps // options.legs
        )
        print(f"{case.title}: {options.steps} steps", flush=True)
    print(f"\n{table(results)}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
