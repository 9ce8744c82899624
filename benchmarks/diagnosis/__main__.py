"""Measure whether the diagnosis names real faults, and whether it is silent about balanced runs.

    python -m benchmarks.diagnosis RESULTS [--minutes 8] [--cases "data 10%,onset"] [--keep FOLDER] [--judge] [--smoke]

Each repetition is a real training of two gloo ranks with a fault by real means (`cases.py`), and after or before it a
balanced twin, both beside the same random load (`background.py`). The verdict is that of the whole diagnosis of the
spooled batches, in this process.

RESULTS is a file of JSON lines. A later call adds to it: the case with the fewest results comes first. With `--keep`
the spools are kept, and `--judge` judges them anew. The tables are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.diagnosis.background import MODES, background
from benchmarks.diagnosis.cases import CASES, Expected, as_json
from benchmarks.diagnosis.judge import balanced_findings, disturbance, verdict
from benchmarks.diagnosis.tables import table
from benchmarks.faults.launch import ranks_of

_TIMEOUT_S = 120
_TELEMETRY = {"DDPOBS_TELEMETRY": "http://127.0.0.1:9", "DDPOBS_RUN": "truth"}


def train(command: tuple[Path, str], folder: Path, environ: dict[str, str]) -> float:
    """Train; returns the seconds that it took.

    Raises:
        RuntimeError: A rank failed; its log is in the message.
    """
    began = time.monotonic()
    script, argument = command
    with ranks_of(script, argument, ranks=2, folder=folder, environ=_TELEMETRY | environ) as ranks:
        ended = [process.wait(_TIMEOUT_S) for process in ranks.processes]
        if any(ended):
            raise RuntimeError(ranks.logs())
    return time.monotonic() - began


def repetition(case: str, number: int, folder: Path) -> dict[str, Any]:
    """Train a case and its twin, in random order; judge both later."""
    draw = random.Random(f"{case} {number}")
    run, mode = CASES[case](draw), draw.choice(list(MODES))
    record = {"case": case, "number": number, "background": mode, "at": time.strftime("%Y-%m-%dT%H:%M:%S")}
    record |= as_json(run) | {"load_before": round(os.getloadavg()[0], 2)}
    trainings = [("fault", run.command), ("twin", run.twin)]
    with background(mode, number):
        for name, command in draw.sample(trainings, 2):
            record[f"{name}_s"] = round(train(command, folder / name, run.environ), 1)
    return record | {"load_after": round(os.getloadavg()[0], 2)}


def judged(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add the verdicts to a repetition."""
    expected = Expected(**record["expected"])
    return record | {
        "fault": verdict(folder / "fault", expected),
        "twin": balanced_findings(folder / "twin"),
        "disturbance": {name: round(disturbance(folder / name), 3) for name in ("fault", "twin")},
    }


def folder_of(kept: Path, record: dict[str, Any]) -> Path:
    """Return the folder of a repetition's spools."""
    return kept / f"{record['case']}-{record['number']}".replace(" ", "-").replace("%", "")


def measure(results: Path, cases: list[str], minutes: float, kept: Path) -> None:
    """Add repetitions for some minutes, the case with the fewest results first."""
    counts = Counter(dict.fromkeys(cases, 0))
    counts.update(record["case"] for record in read(results) if record["case"] in cases)
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        case = min(cases, key=lambda name: (counts[name], random.random()))
        counts[case] += 1
        name = {"case": case, "number": counts[case]}
        folder = folder_of(kept, name)
        shutil.rmtree(folder, ignore_errors=True)
        record = judged(repetition(case, counts[case], folder), folder)
        with results.open("a") as file:
            file.write(json.dumps(record, default=float) + "\n")
        fault, twin = record["fault"], record["twin"]
        facts = {name: value for name, value in fault.items() if name not in ("findings", "injected")}
        print(f"{case} {counts[case]} ({record['background']}, load {record['load_after']}): {facts}", flush=True)
        print(f"    {[f['title'] for f in fault['findings']]}", flush=True)
        print(f"    twin: {[f['severity'] + ' ' + f['title'] for f in twin]}", flush=True)


def read(results: Path) -> list[dict[str, Any]]:
    """Read the results so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def judge_again(results: Path, kept: Path) -> None:
    """Judge all repetitions again whose spools are kept."""
    records = [
        judged(record, folder) if (folder := folder_of(kept, record)).is_dir() else record for record in read(results)
    ]
    results.write_text("".join(json.dumps(record, default=float) + "\n" for record in records))


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--cases", default=",".join(CASES), help="default: all")
    parser.add_argument("--keep", type=Path, help="folder for the spools")
    parser.add_argument("--judge", action="store_true", help="train nothing, judge the kept spools again")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.minutes, options.cases = 0.01, "backward 50%"
    with tempfile.TemporaryDirectory() as text:
        kept = options.keep.resolve() if options.keep else Path(text)
        if options.judge:
            judge_again(options.results, kept)
        else:
            measure(options.results, options.cases.split(","), options.minutes, kept)
    print(f"\n{table(read(options.results))}")


if __name__ == "__main__":
    main()
