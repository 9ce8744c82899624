"""Compare `bucket_cap_mb="auto"` with the default and with a manual sweep, over links of several speeds.

    python -m benchmarks.auto_cap [--rates 500mbit,1gbit,2gbit] [--caps 0.5,1,2.5,5,10,25] [--rounds 20] [--small]

Two ranks have a network namespace each; needs root. On each link a training with auto first decides alone: that is the
cost of trying. Then the default, each cap and auto take turns of some steps in one process, in a new order each round.
`auto / best` compares it with the fastest setting of the sweep.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.links import INTERFACE, address, links
from benchmarks.pairs import ratio
from benchmarks.rig.ranks import run_ranks
from benchmarks.tables import rows_of
from ddpobs import DistributedDataParallel

_RANKS, _LAYERS, _WIDTH, _ROWS = 2, 24, 320, 768
"""10 MB of gradients, which take about as long to compute as to send at 1 Gbit/s."""
_TURN_STEPS, _MOST_STEPS = 6, 1500
DEFAULT, AUTO = "default", "auto"
Step = Callable[[], None]


def _stepping(cap: float | str | None, rank: int) -> tuple[Step, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-5)
    batch = torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()
        optimizer.step()

    return step, ddp


def _rank_main(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:29500", rank=rank, world_size=_RANKS)
    caps: dict[str, float | str | None] = {DEFAULT: None, **{cap: float(cap) for cap in options.caps.split(",")}}
    steps = {name: _stepping(cap, rank)[0] for name, cap in caps.items()}
    _warm_up(steps)
    tried = _decide(rank)
    steps[AUTO] = tried.pop("step")
    tried["default_s"] = _seconds(steps[DEFAULT], 3 * _TURN_STEPS) / (3 * _TURN_STEPS)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffled = list(steps), random.Random(0)
    for _ in range(options.rounds):
        shuffled.shuffle(order)
        for name in order:
            steps[name]()  # It fills the caches.
            seconds[name].append(_seconds(steps[name], _TURN_STEPS) / _TURN_STEPS)
    if rank == 0:
        Path(options.results).write_text(json.dumps({"seconds": seconds, "tried": tried}))
    dist.barrier()


def _warm_up(steps: dict[str, Step]) -> None:
    for step in steps.values():
        _seconds(step, 4)


def _decide(rank: int) -> dict[str, Any]:
    """Train with auto until its decision stands."""
    step, ddp = _stepping("auto", rank)
    count = 0
    began = time.perf_counter()
    while count < _MOST_STEPS and (ddp.reducer.auto_caps is None or not ddp.reducer.auto_caps.is_settled):
        step()
        count += 1
    took_s = time.perf_counter() - began
    return {"step": step, "steps": count, "took_s": took_s, "bucket_bytes": ddp.reducer.bucket_bytes}


def _seconds(step: Step, count: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - began


def measure(rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, each in its namespace, and return the first rank's measurements."""
    with tempfile.TemporaryDirectory() as folder, links(_RANKS, rate) as network:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks.auto_cap", "--caps", options.caps, "--rounds", str(options.rounds)]
        commands = [
            network.inside(rank, [*command, "--results", str(results), "--rank", str(rank)]) for rank in range(_RANKS)
        ]
        run_ranks(commands, [{"GLOO_SOCKET_IFNAME": INTERFACE}] * _RANKS)
        return json.loads(results.read_text())  # type: ignore[no-any-return]


def report(results: dict[str, dict[str, Any]]) -> str:
    """Return the table: a row for each link."""
    rows = []
    for rate, measured in results.items():
        seconds, tried = measured["seconds"], measured["tried"]
        swept = [name for name in seconds if name != AUTO]
        best = min(swept, key=lambda name: sum(seconds[name]))
        against = [str(ratio([seconds[AUTO]], [seconds[name]])) for name in (DEFAULT, best)]
        lost = tried["took_s"] / tried["default_s"] - tried["steps"]
        buckets = " ".join(f"{size / 2**20:.1f}" for size in tried["bucket_bytes"])
        rows.append([rate, against[0], best, against[1], f"{tried['steps']} steps, {lost:+.1f} of them", buckets])
    head = [
        "link",
        "auto / default",
        "best of the sweep",
        "auto / best",
        "trying, and what it lost",
        "buckets, MB",
    ]
    return rows_of(head, rows)


def main() -> None:
    """Measure each link, print the table, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="500mbit,1gbit,2gbit")
    parser.add_argument("--caps", default="0.5,1,2.5,5,10,25")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="one link, two caps, few rounds: does it work?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--results", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        _rank_main(options.rank, options)
        return
    if options.small:
        options.rates, options.caps, options.rounds = "1gbit", "1,5", 6
    results: dict[str, dict[str, Any]] = {}
    for rate in options.rates.split(","):
        results[rate] = measure(rate, options)
        if options.json:  # After each link: one takes ten minutes.
            options.json.write_text(json.dumps(results))
        print(report(results), flush=True)


if __name__ == "__main__":
    main()
