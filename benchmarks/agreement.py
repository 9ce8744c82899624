"""Measure the cost of comparing the ranks' collectives in `ddpobs.horovod`.

    python -m benchmarks.agreement [--rounds 60] [--ranks 2] [--json FILE]

Ranks on this host repeat `hvd.allreduce(tensor, name=…)` over gloo, with the comparison and without, call by call in
turns. A round's ratio is that of its median calls; the figures are the rounds' medians and middle halves. The first
call under a name is an exchange through torch's store; its extra time is that over a call without comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ddpobs.horovod as hvd
from ddpobs.horovod import agreement

ELEMENTS = (1, 2**18)
_FIRST_CALLS = 16


Variant = list[tuple[Any, str, Any]]
CHECKED: Variant = [
    (agreement.Agreement, "check", agreement.Agreement.check),
    (agreement.Agreement, "wait", agreement.Agreement.wait),
]
UNCHECKED: Variant = [
    (agreement.Agreement, "check", lambda *_: None),
    (agreement.Agreement, "wait", lambda _, work: work.wait()),
]
"""Start every collective at once, and wait for it without looking at the other ranks."""
VARIANTS = {"checked": CHECKED, "unchecked": UNCHECKED}


def choose(variant: str) -> None:
    """Run the variant from now on."""
    for owner, name, function in VARIANTS[variant]:
        setattr(owner, name, function)


def seconds(call: Callable[[int], Any], number: int) -> float:
    """Return the seconds of a call."""
    began_s = time.perf_counter()
    call(number)
    return time.perf_counter() - began_s


def measure(rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Return the median seconds of a call in each round, by tensor and variant."""
    torch.set_num_threads(1)
    hvd.init()
    found = {}
    for elements in ELEMENTS:
        tensor = torch.ones(elements)
        times: dict[str, list[float]] = {"checked": [], "unchecked": [], "first": []}
        for number in range(rounds):
            for variant, values in one_round(tensor, number, calls).items():
                times[variant].append(statistics.median(values))
        found[f"float32[{elements}]"] = times
    return found


def one_round(tensor: torch.Tensor, number: int, calls: int) -> dict[str, list[float]]:
    """Return the seconds of each call: first calls under names of their own, then known ones in turns."""
    times: dict[str, list[float]] = {"checked": [], "unchecked": [], "first": []}
    for index in range(_FIRST_CALLS):
        times["first"].append(seconds(lambda i: hvd.allreduce(tensor, name=f"{number}.{i}"), index))

    def known(_: int) -> torch.Tensor:
        return hvd.allreduce(tensor, name="loss")

    for index in range(_FIRST_CALLS):
        known(index)
    for index in range(calls):
        for variant in ("checked", "unchecked")[:: 1 if index % 2 else -1]:
            choose(variant)
            times[variant].append(seconds(known, index))
    choose("checked")
    return times


def summarise(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return [median, lower and upper quartile] of the ratio, and of the extra microseconds of a first call."""
    checked, unchecked, first = (np.array(times[name]) for name in ("checked", "unchecked", "first"))
    return {
        "unchecked_us": _quartiles(1e6 * unchecked),
        "ratio": _quartiles(checked / unchecked),
        "first_us": _quartiles(1e6 * (first - unchecked)),
    }


def _quartiles(values: Any) -> list[float]:
    return [float(value) for value in np.percentile(values, [50, 25, 75])]


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Return a Markdown table."""
    lines = ["| | unchecked, µs | checked / unchecked | extra time of a first call, µs |", "|---|---|---|---|"]
    for name, row in results.items():
        cells = [
            f"{middle:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"
            for digits, (middle, low, high) in zip((0, 3, 0), row.values(), strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=300, help="calls of a round; default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.calls = 2, 2
    by_rank = hvd.run(measure, args=(options.rounds, options.calls), np=options.ranks)
    results = {name: summarise(times) for name, times in by_rank[0].items()}
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
