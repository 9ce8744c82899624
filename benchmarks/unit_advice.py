"""Follow what findings advise about the units of FSDP2, and compare the predicted saving with the measured one.

    sudo python -m benchmarks.unit_advice [--gbps 1] [--rounds 3] [--steps 48] [--json FILE] [--smoke]

Two ranks are hosts of their own: each has a network namespace, a host's name, one thread and a shaped link. Layers wait
in place of computing, as for an accelerator, so they leave the processors to gloo. In each round a training as it is
and one that follows the advice run one after the other, in a new order; each is a run of its own with telemetry. The
predicted saving is the median of the findings'.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from benchmarks.command import measure_and_print, parser_of
from benchmarks.faults.launch import ranks_of
from benchmarks.links import INTERFACE, Links, address, links
from benchmarks.rig.collector import push, running_collector, spooling

SCRIPT = Path(__file__).with_name("whatif") / "sharded_training.py"
_TIMEOUT_S = 600
_WARM_UP = 8
"""Steps that are not measured."""


@dataclass(frozen=True)
class Setting:
    """A training: layers of this width, each of which waits for `wait_s`, and `merged` of which are a unit; a head."""

    units: int
    width: int
    head: int
    rows: int
    wait_s: float = 0.0
    merged: int = 1
    early: bool = False


@dataclass(frozen=True)
class Case:
    """A training, the finding that it has, and the training that follows the finding's advice.

    Attributes:
        delay_s: Delay of the link in each direction.
    """

    code: str
    given: Setting
    changed: Setting
    delay_s: float = 0.0


_LATE = Setting(units=8, width=800, head=100, rows=16, wait_s=0.02)
_SMALL = Setting(units=32, width=150, head=2000, rows=16)
CASES = {
    "all-gathers earlier": Case("prefetch-missing", _LATE, replace(_LATE, early=True)),
    "units merged, link of 2 ms": Case("unit-size", _SMALL, replace(_SMALL, merged=_SMALL.units), delay_s=0.002),
}


def measure(setting: Setting, run: str, network: Links, url: str, steps: int) -> float:
    """Train, send the telemetry to the collector, and return the median time of a step in ms."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        environ = spooling(run, folder) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        arguments = json.dumps(asdict(setting) | {"steps": steps})
        with ranks_of(
            SCRIPT,
            arguments,
            ranks=2,
            folder=folder,
            environ=environ,
            namespaces=lambda rank: network.namespaces(rank, "net", "uts"),
            master=address(0),
        ) as ranks:
            if any(process.wait(_TIMEOUT_S) for process in ranks.processes):
                raise RuntimeError(f"{run} failed:\n{ranks.logs()}")
        push(folder / "spool", url)
    columns = _get(url, f"{run}/steps")["columns"]
    took = np.array(columns["end_ns"]) - columns["start_ns"]
    return float(np.median(took[np.array(columns["step"]) >= _WARM_UP])) / 1e6


def predicted(url: str, run: str, code: str) -> float | str:
    """Return the saving that the run's finding predicts, in ms a step; without the finding, why it was not judged."""
    diagnosis = _get(url, f"{run}/diagnostics")
    for finding in diagnosis["findings"]:
        if finding["code"] == code:
            return float(finding["gain"]["step_ns"] / 1e6)
    return next((reason for reason in diagnosis["missing"] if reason.startswith(code)), "no finding")


def _get(url: str, path: str) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{url}/api/v1/runs/{path}", timeout=60).raise_for_status().json()
    return document


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases."""
    found: dict[str, Any] = {}
    order = random.Random(0)
    with (
        tempfile.TemporaryDirectory() as text,
        running_collector(Path(text)) as url,
        links(2, f"{options.gbps:g}gbit") as network,
    ):
        for number, (name, case) in enumerate(CASES.items()):
            rows = []
            network.set_delay(case.delay_s)
            for turn in range(options.rounds):
                arms = [("given", case.given), ("changed", case.changed)]
                order.shuffle(arms)
                names = {arm: f"{number}-{turn}-{arm}" for arm, _ in arms}
                row: dict[str, Any] = {
                    arm: measure(setting, names[arm], network, url, options.steps) for arm, setting in arms
                }
                rows.append(row | {arm + " predicts": predicted(url, names[arm], case.code) for arm in names})
                print(f"{name}: {rows[-1]}", file=sys.stderr, flush=True)
            found[name] = rows
    return found


def report(found: dict[str, Any]) -> str:
    """Return the table."""
    lines = [
        "| advice | step as it is | predicted saving | measured saving | the same advice afterwards |",
        "|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        saved = [row["given"] - row["changed"] for row in rows]
        named = [row["given predicts"] for row in rows if isinstance(row["given predicts"], float)]
        again = sum(isinstance(row["changed predicts"], float) for row in rows)
        said = f"{median(named):.1f} ms (named in {len(named)} of {len(rows)})" if named else "none"
        lines.append(
            f"| {name} | {median(row['given'] for row in rows):.1f} ms | {said} | "
            f"{median(saved):.1f} ms ({min(saved):.1f} to {max(saved):.1f}) | in {again} of {len(rows)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.steps = 1, 32
    measure_and_print("benchmarks.unit_advice", options, run, report)


if __name__ == "__main__":
    main()
