"""Measure how often the cause of a slow rank is stated right.

    python -m benchmarks.causes [--times 20] [--cases neighbour,quota] [--steps 120] [--json FILE] [--smoke]

Each repetition is a real training of two gloo ranks, of which rank 1 is slow by real means (`faults/slowing.py`): busy
processes on its processor, a quota of its control group, collections of a big heap, reads of dropped pages, more work,
or longer inputs. The case `quota` needs the right to make a control group. No collector runs: the findings are those of
the spooled batches.

Other programs on the machine are a cause of their own. So a run counts as disturbed if rank 0, which has no fault,
waited for its processor for more than half of the time that it ran. The table has both figures.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.findings.imbalanced_batches import imbalanced_batches
from ddpobs_server.analysis.findings.straggler import straggler
from ddpobs_server.analysis.steps.joined_steps import join

from benchmarks.faults.launch import ranks_of
from benchmarks.faults.slowing import CASES, SLOW
from benchmarks.tables import rows_of
from ddpobs import wire
from ddpobs.export.spool import Spool

SLOWING = Path(__file__).parent / "faults" / "slowing.py"
RIGHT: dict[str, set[tuple[str, str | None]]] = {
    "balanced": set(),
    "neighbour": {("straggler", "preempted")},
    "quota": {("straggler", "throttled")},
    "garbage": {("straggler", "collecting-garbage")},
    "paging": {("straggler", "paging")},
    "work": {("straggler", "own-work")},
    "lengths": set(),
    "longer": {("imbalanced-batches", None)},
    "longer+neighbour": {("straggler", "preempted"), ("imbalanced-batches", None)},
}
"""Findings of each case, all of rank 1: code and cause."""
assert set(RIGHT) == set(CASES)
_TIMEOUT_S = 300
_DISTURBED = 0.5


def findings_of(evidence: Evidence) -> list[Finding]:
    """Return the findings that name a rank."""
    results = [*straggler(evidence), *imbalanced_batches(evidence)]
    return [result for result in results if isinstance(result, Finding) and result.ranks]


def disturbance(evidence: Evidence) -> float:
    """Return rank 0's time in the run queue over its time on a processor."""
    steps = evidence.steps.select((evidence.rank != SLOW) & (evidence.steps.running_ns >= 0))
    return float(steps.run_delay_ns.sum() / max(1, steps.running_ns.sum()))


def train(case: str, steps: int, folder: Path) -> Evidence:
    """Train one case; its files are in `folder`.

    Raises:
        RuntimeError: A rank failed; its log is in the message.
    """
    environ = {"DDPOBS_TELEMETRY": "http://127.0.0.1:9", "DDPOBS_RUN": "causes", "STEPS": str(steps)}
    with ranks_of(SLOWING, case, ranks=2, folder=folder, environ=environ) as ranks:
        ended = [process.wait(_TIMEOUT_S) for process in ranks.processes]
        if any(ended):
            raise RuntimeError(ranks.logs())
    return evidence_of(folder / "spool")


def evidence_of(spool: Path) -> Evidence:
    """Read the steps of all ranks from a spool."""
    ranks, parts = [], []
    for spooled in Spool(spool, 2**30).batches():
        batch = wire.decode(zstandard.decompress(spooled.body(), max_output_size=2**28))
        if batch.steps is not None:
            ranks.append(np.full(len(batch.steps), batch.rank))
            parts.append(batch.steps)
    rank, steps = np.concatenate(ranks), wire.Steps.concat(parts)
    return Evidence(rank=rank, steps=steps, joined=join(rank, steps))


def verdict(findings: list[Finding]) -> set[tuple[str, str | None]]:
    """Return code and cause of each finding; another rank than the slow one makes the code wrong."""
    return {
        (f.code if f.ranks == [SLOW] else f"{f.code} of another rank", f.as_json()["evidence"].get("cause"))
        for f in findings
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table: the runs that are right, and of the others those with no, a part of, a wrong verdict."""
    rows = []
    for case, runs in results.items():
        disturbed = [run["disturbance"] > _DISTURBED for run in runs]
        verdicts = [set(run["verdict"]) for run in runs if not run["right"]]
        true = set(map(str, RIGHT[case]))
        others = [
            sum(not named for named in verdicts),
            sum(bool(named) and named < true for named in verdicts),
            sum(not named <= true for named in verdicts),
        ]
        rows.append([case, _right(runs, disturbed, False), _right(runs, disturbed, True), *map(str, others)])
    return rows_of(["rank 1", "right, undisturbed", "right, disturbed", "no cause", "one of two", "wrong"], rows)


def _right(runs: list[dict[str, Any]], disturbed: list[bool], kind: bool) -> str:
    chosen = [run["right"] for run, is_disturbed in zip(runs, disturbed, strict=True) if is_disturbed == kind]
    return f"{sum(chosen)} of {len(chosen)}"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.times, options.cases, options.steps = 1, "garbage", 40
    results: dict[str, list[dict[str, Any]]] = {case: [] for case in options.cases.split(",")}
    for _ in range(options.times):
        for case, runs in results.items():
            with tempfile.TemporaryDirectory() as folder:
                evidence = train(case, options.steps, Path(folder))
            findings = findings_of(evidence)
            named = verdict(findings)
            runs.append(
                {
                    "disturbance": round(disturbance(evidence), 3),
                    "right": named == RIGHT[case],
                    "verdict": sorted(map(str, named)),
                    "titles": [finding.title for finding in findings],
                    "evidence": [finding.as_json()["evidence"] for finding in findings],
                }
            )
            print(f"{case} ({runs[-1]['disturbance']}): {runs[-1]['titles'] or 'no rank named'}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2, default=float) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
