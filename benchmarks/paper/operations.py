"""Repeat figure 2 (a), (b) of the DDP paper: the time to reduce 60 M parameters, by the parameters of an operation.

    sudo python -m benchmarks.paper.operations [--rate 1gbit] [--rounds 5] [--json FILE] [--smoke]

Two hosts in network namespaces with a shaped link. All operations are launched, then awaited. gloo and MPI take turns
in the same processes, in a new random order in each round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.links import LinkError, links
from benchmarks.pairs import ratio
from benchmarks.rig import patience
from benchmarks.source import facts, keep
from benchmarks.tables import change, rows_of
from benchmarks.two_nodes import HOSTS, ON_LINK, mpiexec

PARAMETERS = 60_000_000
SHARES = (6000, 600, 60, 6, 1)
"""Operations that the parameters are divided over: of 10 K parameters to all."""
_TIMEOUT_S = 900


def measure(group: Any, parameters: torch.Tensor, operations: int) -> float:
    """Return the seconds of reducing the parameters in so many operations."""
    parts = parameters.chunk(operations)
    dist.barrier(group=group)
    began = time.perf_counter()
    works = [dist.all_reduce(part, group=group, async_op=True) for part in parts]
    for work in works:
        assert work is not None
        work.wait()
    return time.perf_counter() - began


def rank_main(options: argparse.Namespace) -> None:
    """Measure in rounds; the first rank writes the seconds, by group and operations."""
    import ddpobs.mpi  # Initializes MPI.

    torch.set_num_threads(1)
    dist.init_process_group(ddpobs.mpi.BACKEND)
    groups = {"gloo": dist.new_group(backend="gloo"), "MPI": None}
    parameters = torch.zeros(options.parameters)
    cases = [(name, operations) for name in groups for operations in SHARES]
    seconds: dict[str, dict[int, list[float]]] = {name: {operations: [] for operations in SHARES} for name in groups}
    shuffled = random.Random(0)
    for round_ in range(1 + options.rounds):
        shuffled.shuffle(cases)
        for name, operations in cases:
            taken_s = measure(groups[name], parameters, operations)
            if round_:  # The first round makes the connections.
                seconds[name][operations].append(round(taken_s, 6))
    if dist.get_rank() == 0:
        Path(os.environ["OUT"], "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, and return their seconds."""
    with tempfile.TemporaryDirectory() as text, links(HOSTS, options.rate) as network:
        environ = ON_LINK | {"OUT": text}
        arguments = ["--parameters", str(options.parameters), "--rounds", str(options.rounds), "--rank"]
        command = [*mpiexec(Path(text), network, environ), sys.executable, "-m", "benchmarks.paper.operations"]
        command = network.on_own_host(0, [*command, *arguments])
        done = patience.run(command, environ=os.environ | environ, timeout_s=_TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return json.loads(Path(text, "seconds.json").read_text())  # type: ignore[no-any-return]


def table(results: dict[str, Any]) -> str:
    """Return a row for each number of operations: its time over that of one operation of all parameters."""
    rows = []
    for operations in map(str, SHARES):
        over_one = [change(ratio([seconds[operations]], [seconds["1"]])) for seconds in results["seconds"].values()]
        rows.append([f"{results['parameters'] // int(operations):,}", *over_one])
    head = (f"{name}, over one operation, %" for name in results["seconds"])
    return rows_of(["parameters an operation", *head], rows)


def draw_operations(results: dict[str, Any], path: Path) -> None:
    """Draw the seconds by the parameters of an operation, into a file of the kind that its name says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    sizes = np.array([results["parameters"] / operations for operations in SHARES])
    for (name, seconds), style, shift in zip(results["seconds"].items(), ("o-", "s--"), (0.96, 1.04), strict=True):
        rounds = np.array([seconds[str(operations)] for operations in SHARES])
        middle = np.median(rounds, axis=1)
        ends = [middle - rounds.min(axis=1), rounds.max(axis=1) - middle]
        shape: dict[str, Any] = {"color": "black", "markerfacecolor": "white", "capsize": 3}
        axes.errorbar(shift * sizes, middle, ends, fmt=style, **shape, label=f"{name}: median, least and most")
    axes.plot([], [], " ", label="claim of figure 2: larger operations are faster")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("parameters an operation")
    axes.set_ylabel(f"seconds to reduce {results['parameters']:,} parameters")
    axes.legend(fontsize="small")
    figure.suptitle(f"All-reduce by the size of an operation, two ranks, {results['rate']}")
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the links, as tc writes it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--rank", action="store_true", help="run as a rank: set by the benchmark itself")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.parameters = 2, 60_000
    if options.rank:
        rank_main(options)
        return
    try:
        results = facts("ddpobs/mpi", "benchmarks/paper/operations.py") | {"seconds": measured(options)}
    except LinkError as error:
        sys.exit(f"benchmarks.paper.operations: {error}")
    results |= {"parameters": options.parameters, "rate": options.rate}
    print(table(results))
    keep(results, options.json)


if __name__ == "__main__":
    main()
