"""Measure how soon a hang is named, and whether it is named right.

    python -m benchmarks.hangs [--times 20] [--ranks 2] [--cases loader,stop] [--json FILE] [--smoke]

Each repetition is a real training of gloo ranks with a fault by real means (`benchmarks/faults/`), which reports to a
real collector. A hang is named once the collector's diagnosis holds a critical finding `hang`, and once a surviving
rank has logged its verdict. The time counts from the fault. Healthy trainings that take long must not be named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import capacity
from benchmarks.faults.cases import CASES, HEALTHY, Case
from benchmarks.faults.launch import HANGING, Ranks, ranks_of

LIMIT_S = 40
"""Seconds after which a hang counts as not named."""


def finding_of(url: str, run: str) -> dict[str, Any] | None:
    """Return the run's critical `hang` finding; None without one, or before the run has sent anything."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/runs/{run}/diagnostics", timeout=30) as reply:
            findings: list[dict[str, Any]] = json.load(reply)["findings"]
    except urllib.error.URLError:
        return None
    return next((f for f in findings if f["code"] == "hang" and f["severity"] == "critical"), None)


def hang(url: str, run: str, case: Case, ranks: int, folder: Path) -> dict[str, Any]:
    """Run one case until the collector and a rank's log have named it."""
    by_collector = not case.cuts  # The namespaces of its ranks do not reach the collector.
    result: dict[str, Any] = {"log_s": None, "log_right": False}
    if by_collector:
        result |= {"collector_s": None, "collector_right": False}
    with case.training(folder, ranks, {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run}) as (running, began):
        while time.time() < began + LIMIT_S and None in result.values():
            if result["log_s"] is None and _verdicts(running):
                result["log_s"] = time.time() - began
                result["log_right"] = bool(case.pattern(ranks).search(running.logs()))
            if by_collector and result["collector_s"] is None and (finding := finding_of(url, run)):
                result["collector_s"] = time.time() - began
                named = finding["evidence"]["kind"], finding["ranks"]
                result["collector_right"] = named == (case.kind, case.culprits(ranks))
                result["title"] = finding["title"]
            time.sleep(0.2)
    return result


def healthy(url: str, run: str, name: str, folder: Path) -> dict[str, Any]:
    """Run a training that only takes long, and return whether it was named."""
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run, "STEPS": "80", "PAUSE_S": "20"}
    alarm = False
    with ranks_of(HANGING, name, ranks=2, folder=folder, environ=environ) as running:
        while any(process.poll() is None for process in running.processes):
            alarm = alarm or finding_of(url, run) is not None
            time.sleep(0.5)
        return {"alarm": alarm or bool(_verdicts(running))}


def _verdicts(running: Ranks) -> list[str]:
    """Lines in which a rank names a hang."""
    return [line for line in running.logs().splitlines() if line.startswith("ddpobs: The run hangs")]


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table."""
    lines = [
        "| case | collector: right | seconds: median, most | log: right | seconds: median, most |",
        "|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        if name in HEALTHY:
            alarms = sum(run["alarm"] for run in runs)
            lines.append(f"| {name} (healthy) | {alarms} false alarms in {len(runs)} | | | |")
            continue
        cells = [cell for source in ("collector", "log") for cell in _cells(source, runs)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(source: str, runs: list[dict[str, Any]]) -> list[str]:
    if f"{source}_right" not in runs[0]:
        return ["not reached", ""]
    seconds = [run[f"{source}_s"] for run in runs if run[f"{source}_s"] is not None]
    right = f"{sum(run[f'{source}_right'] for run in runs)} of {len(runs)}"
    return [right, f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""]


def measure(names: list[str], times: int, ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Run each case several times, in turns."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as text, capacity.collector(Path(text), f"sqlite:///{text}/runs.db") as (_, url):
        for number in range(times):
            for name in names:
                run, folder = f"{name}-{ranks}-{number}", Path(text) / f"{name}-{number}"
                if name in HEALTHY:
                    results[name].append(healthy(url, run, name, folder))
                else:
                    results[name].append(hang(url, run, CASES[name], ranks, folder))
                print(run, results[name][-1], flush=True)
    return results


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--cases", default=",".join([*CASES, *HEALTHY]), help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.times, options.cases = 1, "lock"
    results = measure(options.cases.split(","), options.times, options.ranks)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
