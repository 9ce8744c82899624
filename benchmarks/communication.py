"""Measure each communication strategy on a slow link: step time and bytes, against the plain all-reduce.

    sudo python -m benchmarks.communication [--ranks 2] [--rate 1gbit] [--minutes 5] [--json FILE] [--smoke]

Every rank has its own network namespace with one thread and a shaped link. Every variant trains its own copy of the
same model in the same processes. A round runs each variant for a few steps, in a new random order. Bytes are the link's
own counters, the larger of both directions.

The first table has ratios of step time to the plain all-reduce with 95 % intervals over rounds, and bytes a step as a
multiple of the gradients' size. The second compares published claims with the measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.links import INTERFACE, LinkError, address, links, moved_bytes
from benchmarks.pairs import ratio
from benchmarks.parameter_server import ParameterServer, Servers
from benchmarks.rig.ranks import run_ranks
from benchmarks.tables import change, rows_of
from ddpobs import DistributedDataParallel
from ddpobs.comm import PowerSGD

PLAIN = "plain all-reduce"
STEPS_A_TURN = 2
CAPS_MB = {"0": 0.001, "1": 1.0, "5": 5.0, "25": 25.0, "50": 50.0, "all in one": 10_000.0}
Step = Callable[[], None]


def model(width: int, layers: int = 24) -> nn.Module:
    """Return an MLP of `layers` layers of the same width, identical on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


def variants() -> dict[str, Callable[[nn.Module], Any]]:
    """Return, by name, the function that wraps the model. With servers each layer is a bucket, so all serve equally."""
    ours = DistributedDataParallel
    wrappers: dict[str, Callable[[nn.Module], Any]] = {
        PLAIN: ours,
        "the same again": ours,
        "fp16": partial(ours, comm="fp16"),
        "bf16": partial(ours, comm="bf16"),
        "int8": partial(ours, comm="int8"),
        "top-k, 1 %": partial(ours, comm="topk:0.01"),
        "PowerSGD, rank 4": partial(ours, comm=partial(PowerSGD, rank=4, start_iteration=2)),
        "round-robin, 3 groups": partial(ours, round_robin_groups=3),
        "round-robin, 5 groups": partial(ours, round_robin_groups=5),
        "parameter server": partial(ours, comm=ParameterServer),
        "one server": partial(ours, comm=Servers, bucket_cap_mb=2.0),
        "a server on each rank": partial(ours, comm=partial(Servers, on_each_rank=True), bucket_cap_mb=2.0),
        "DataParallel-like": DataParallelLike,
    }
    for label, cap in CAPS_MB.items():
        wrappers[f"cap {label}"] = partial(ours, bucket_cap_mb=cap)
        wrappers[f"torch, cap {label}"] = partial(TorchDDP, bucket_cap_mb=cap)
    return wrappers


class DataParallelLike(nn.Module):
    """Traffic of torch.nn.DataParallel between processes: parameters out before a step, gradients back after it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast the first rank's parameters, then call the module."""
        flat = nn.utils.parameters_to_vector(self.module.parameters()).detach()
        dist.broadcast(flat, 0)
        nn.utils.vector_to_parameters(flat, self.module.parameters())
        return self.module(x)  # type: ignore[no-any-return]

    def collect(self) -> None:
        """Reduce the sum of all gradients to the first rank."""
        flat = torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None])
        dist.reduce(flat, 0)


def stepping(wrapped: nn.Module, batch: torch.Tensor) -> Step:
    """Return a function that trains one step of a variant."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(batch).pow(2).mean().backward()
        if isinstance(wrapped, DataParallelLike):
            wrapped.collect()
        optimizer.step()

    return step


def rank_main(rank: int, options: argparse.Namespace) -> None:
    """Run every variant in turns; the first rank writes the measurements."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:29500", rank=rank, world_size=options.ranks)
    batch = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(rank))
    chosen = {name: wrap for name, wrap in variants().items() if not options.only or name in options.only}
    steps = {name: stepping(wrap(model(options.width)), batch) for name, wrap in chosen.items()}
    for step in steps.values():  # Buckets are rebuilt after the first step, and PowerSGD compresses from the third on.
        for _ in range(4):
            step()
    order, shuffled = list(steps), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    moved: dict[str, list[list[int]]] = {name: [] for name in steps}
    deadline = time.monotonic() + 60 * options.minutes
    while _agreed(time.monotonic() < deadline or not seconds[PLAIN]):
        shuffled.shuffle(order)
        for name in order:
            step_s, sent_bytes, received_bytes = _turn(steps[name])
            seconds[name].append(step_s)
            moved[name].append([sent_bytes, received_bytes])
    by_rank: list[Any] = [None] * options.ranks
    dist.all_gather_object(by_rank, moved)
    if rank == 0:
        size = sum(p.numel() * p.element_size() for p in model(options.width).parameters())
        busiest = {name: float(np.median(np.max([m[name] for m in by_rank], axis=(0, 2)))) / size for name in steps}
        mean = {name: float(np.mean([m[name] for m in by_rank])) / size for name in steps}
        measurements = {"seconds": seconds, "busiest_link": busiest, "mean_link": mean, "gradient_bytes": size}
        Path(options.results).write_text(json.dumps(measurements))
    dist.barrier()


def _turn(step: Step) -> tuple[float, int, int]:
    dist.barrier()
    sent_bytes, received_bytes = moved_bytes()
    began = time.perf_counter()
    for _ in range(STEPS_A_TURN):
        step()
    elapsed_s = time.perf_counter() - began
    dist.barrier()
    sent_after, received_after = moved_bytes()
    return (
        elapsed_s / STEPS_A_TURN,
        (sent_after - sent_bytes) // STEPS_A_TURN,
        (received_after - received_bytes) // STEPS_A_TURN,
    )


def _agreed(continues: bool) -> bool:
    flag = torch.tensor([int(continues)])
    dist.broadcast(flag, 0)
    return bool(flag.item())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, each in its namespace, and return the first rank's measurements."""
    with tempfile.TemporaryDirectory() as folder, links(options.ranks, options.rate) as network:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks.communication", *sys.argv[1:]]
        environs = [
            {"GLOO_SOCKET_IFNAME": INTERFACE, "DDPOBS_BENCH_RANK": str(rank), "DDPOBS_BENCH_RESULTS": str(results)}
            for rank in range(options.ranks)
        ]
        run_ranks([network.inside(rank, command) for rank in range(options.ranks)], environs)
        return json.loads(results.read_text())  # type: ignore[no-any-return]


def report(results: dict[str, Any], options: argparse.Namespace) -> str:
    """Return two Markdown tables: the measurements, and the claims."""
    seconds = results["seconds"]
    size = results["gradient_bytes"]
    lines = [
        f"{options.ranks} ranks, {options.rate} links, {size / 2**20:.0f} MiB of gradients, "
        f"{len(seconds[PLAIN])} rounds of {STEPS_A_TURN} steps. "
        f"A plain step takes {np.median(seconds[PLAIN]):.2f} s (median).",
        "",
        "| variant | step time, plain = 1 | bytes on the busiest link, gradients = 1 | on the mean link |",
        "|---|---|---|---|",
    ]
    for name, step_s in seconds.items():
        against_plain = ratio([step_s], [seconds[PLAIN]])
        lines.append(
            f"| {name} | {against_plain} | {results['busiest_link'][name]:.2f} | {results['mean_link'][name]:.2f} |"
        )
    return "\n".join([*lines, "", *_claims(results)])


def traffic(results: dict[str, Any]) -> str:
    """Return a row for each variant: bytes a step on the links, and with several rounds the step's time."""
    seconds, size = results["seconds"], results["gradient_bytes"]
    rows = []
    for name, step_s in seconds.items():
        against_plain = change(ratio([step_s], [seconds[PLAIN]])) if len(step_s) > 1 and name != PLAIN else ""
        shares = [f"{100 * results[link][name]:.0f} %" for link in ("busiest_link", "mean_link")]
        rows.append([name, *shares, against_plain])
    head = ["", f"bytes on the busiest link, of {size / 2**20:.0f} MiB of gradients", "on the mean link"]
    return rows_of([*head, f"step over that of {PLAIN}, %"], rows)


def _claims(results: dict[str, Any]) -> list[str]:
    seconds, busiest = results["seconds"], results["busiest_link"]

    def against(name: str, other: str) -> str:
        return str(ratio([seconds[name]], [seconds[other]])) if name in seconds and other in seconds else "not run"

    def traffic(name: str, other: str) -> str:
        return f"{busiest[name] / busiest[other]:.2f}" if name in busiest and other in busiest else "not run"

    def below(name: str, other: str) -> bool | None:
        measured = name in seconds and other in seconds
        return ratio([seconds[name]], [seconds[other]]).high < 1 if measured else None

    def less(name: str, other: str, low: float, high: float) -> bool | None:
        return low <= busiest[name] / busiest[other] <= high if name in busiest and other in busiest else None

    caps = {label: np.median(seconds[f"cap {label}"]) for label in CAPS_MB if f"cap {label}" in seconds}
    best = min(caps, key=lambda label: caps[label]) if caps else "not run"
    rows = [
        (
            "fp16 halves the traffic",
            f"{traffic('fp16', PLAIN)} of plain's bytes, {against('fp16', PLAIN)} of its step",
            less("fp16", PLAIN, 0.49, 0.51),
        ),
        (
            "all-reduce needs 50 to 70 % less traffic than a parameter server",
            f"{traffic(PLAIN, 'parameter server')} of its busiest link's bytes, {against(PLAIN, 'parameter server')} "
            "of its step",
            less(PLAIN, "parameter server", 0.3, 0.5),
        ),
        (
            "round-robin groups pay",
            f"3 groups: {against('round-robin, 3 groups', PLAIN)} of plain's step; "
            f"5 groups: {against('round-robin, 5 groups', PLAIN)}",
            below("round-robin, 3 groups", PLAIN),
        ),
        (
            "DDP is faster than DataParallel",
            f"{against(PLAIN, 'DataParallel-like')} of its step",
            below(PLAIN, "DataParallel-like"),
        ),
        (
            "communication overlaps with backward",
            f"25 MB: {against('cap 25', 'cap all in one')} of the step in one bucket",
            below("cap 25", "cap all in one"),
        ),
        ("a cap of 0 is the slowest", f"{against('cap 0', 'cap 25')} of the step with 25 MB", below("cap 25", "cap 0")),
        (
            "caps of 25 to 125 MB are best",
            f"the fastest here: {best} MB; 5 MB {against('cap 5', 'cap 25')} of the step with 25 MB",
            best in ("25", "50") if caps else None,
        ),
    ]
    words = {True: "holds", False: "does not hold here", None: "not run"}
    table = [f"| {claim} | {measured} | {words[holds]} |" for claim, measured, holds in rows]
    return ["| claimed | measured | |", "|---|---|---|", *table]


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it")
    parser.add_argument("--minutes", type=float, default=5.0, help="of rounds, after the warm-up")
    parser.add_argument("--width", type=int, default=724, help="of the MLP's 24 layers: 12.6 M parameters")
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--only", nargs="*", help="variants to run, including the plain one")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the results in the file")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.table:
        results = json.loads(options.json.read_text())
        print(report(results, argparse.Namespace(**results["options"])))
        return
    if options.smoke:
        options.width, options.batch, options.minutes = 64, 8, 0.0
    rank = os.environ.get("DDPOBS_BENCH_RANK")
    if rank is not None:
        options.results = os.environ["DDPOBS_BENCH_RESULTS"]
        rank_main(int(rank), options)
        return
    try:
        results = measure(options)
    except LinkError as error:
        raise SystemExit(str(error)) from error
    print(report(results, options))
    if options.json:
        settings = vars(options) | {"json": None}
        options.json.write_text(json.dumps({"options": settings, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
