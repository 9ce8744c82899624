"""Kill ranks of small trainings in every way, and compare the collector's finding with the truth.

    python -m benchmarks.crashes [--kills 100] [--json FILE]

Two ranks train with a real collector. Rank 1 ends in a random step and phase: by an exception, SIGKILL, `os._exit`, a
segmentation fault or SIGTERM. The place is right if the finding `crash` names rank 1, that step and that phase. A step
is lost if rank 1 ended it and the collector does not have it. The seconds are from the end of rank 1 to the finding.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from benchmarks import capacity
from benchmarks.faults.crashing import FAULTY, KINDS, PHASES, step_ends
from benchmarks.faults.launch import CRASHING, ranks_of

_PATIENCE_S = 60.0
_FIRST_STEP, _LAST_STEP = 110, 240


@dataclass(frozen=True)
class Crash:
    """One end of rank 1.

    Attributes:
        kind: How it ended.
        phase: The phase in which it ended.
        step: The step.
        named: Rank, step and phase of the finding.
        is_right: Whether they are the truth.
        lost_steps: Steps that it ended and that the collector does not have.
        lost_s: Time between the ends of its last stored and of its last step.
        seconds: Time from its end to the finding; -1 if there was none, or if it was read later.
    """

    kind: str
    phase: str
    step: int
    named: list[Any]
    is_right: bool
    lost_steps: int
    lost_s: float
    seconds: float


def crash(kind: str, phase: str, step: int, address: str, folder: Path) -> Crash:
    """Train until rank 1 ends, and read the collector's finding."""
    run = folder.name
    environ = {"DDPOBS_TELEMETRY": address, "DDPOBS_RUN": run, "FAULT_STEP": str(step), "DDPOBS_EXIT_S": "20"}
    with ranks_of(CRASHING, kind, phase, ranks=2, folder=folder, environ=environ) as ranks:
        began = ranks.wait_for_fault()
        named: list[Any] = []
        while not named and time.time() - began < _PATIENCE_S:
            time.sleep(0.1)
            named = finding(address, run)
        seconds = time.time() - began if named else -1.0
        for process in ranks.processes:
            process.wait(_PATIENCE_S)
    moments = step_ends(folder, FAULTY)
    rows = httpx.get(f"{address}/api/v1/runs/{run}/ranks").json()["ranks"]
    stored = next((int(row["steps"]) for row in rows if row["rank"] == FAULTY), 0)
    stored = min(stored, len(moments))  # A step that ended in its optimizer is stored too.
    lost_s = moments[-1] - moments[max(0, stored - 1)]
    is_right = named == [FAULTY, step, phase]
    return Crash(kind, phase, step, named, is_right, len(moments) - stored, lost_s, seconds)


def finding(address: str, run: str) -> list[Any]:
    """Return rank, step and phase of the finding `crash` once it names rank 1; empty before."""
    reply = httpx.get(f"{address}/api/v1/runs/{run}/diagnostics")
    findings = reply.json()["findings"] if reply.status_code == httpx.codes.OK else []
    first = next((each for each in findings if each["code"] == "crash" and each["ranks"] == [FAULTY]), None)
    return [first["ranks"][0], first["steps"][0], first["phase"]] if first is not None else []


def table(crashes: Sequence[Crash]) -> str:
    """Return a Markdown table with a row for each kind."""
    lines = [
        "| rank 1 ends by | kills | place right | steps lost: median, most | time lost, most | finding: median, most |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        rows = [row for row in crashes if row.kind == kind]
        if rows:
            right = sum(row.is_right for row in rows) / len(rows)
            lost, lost_s, seconds = (
                np.array([getattr(row, name) for row in rows]) for name in ("lost_steps", "lost_s", "seconds")
            )
            losses = f"{np.median(lost):.0f}, {lost.max():.0f} | {lost_s.max():.2f} s"
            times = f"{np.median(seconds):.1f}, {seconds.max():.1f} s"
            lines.append(f"| {kind} | {len(rows)} | {right:.0%} | {losses} | {times} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each kind; default: %(default)s")
    parser.add_argument("--json", type=Path, help="file for the results, continued from an earlier run")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    kinds = ("exception", "kill") if options.smoke else KINDS
    kills = 1 if options.smoke else options.kills
    crashes = (
        [Crash(**row) for row in json.loads(options.json.read_text())] if options.json and options.json.exists() else []
    )
    order, counts = random.Random(len(crashes)), Counter(row.kind for row in crashes)
    with TemporaryDirectory() as name:
        folder = Path(name)
        with capacity.collector(folder, f"sqlite:///{folder}/runs.db") as (_, address):
            for number in range(kills):
                for kind in (each for each in kinds if number >= counts[each]):
                    step = order.randrange(_FIRST_STEP, _LAST_STEP)
                    case = (kind, order.choice(PHASES), step, address)
                    try:
                        crashes.append(crash(*case, folder / f"{kind}-{number}"))
                    except TimeoutError:  # Another program has taken the port meanwhile.
                        crashes.append(crash(*case, folder / f"{kind}-{number}-again"))
                    if not crashes[-1].is_right:
                        print(crashes[-1], flush=True)
                    if options.json:
                        options.json.write_text(json.dumps([asdict(row) for row in crashes], indent=1) + "\n")
    print(table(crashes))


if __name__ == "__main__":
    main()
