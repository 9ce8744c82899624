"""Compare the cost of slow ranks with the published one, on the sample traces of arXiv 2505.05713.

    python -m benchmarks.slowdown FOLDER

The folder is `data` of https://github.com/ByteDance-Seed/StragglerAnalysis: it has trace-NAME.parquet and the published
result-NAME.json. Each trace is imported as `ddpobs import` does, and S comes from the ranks' own times in the run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from ddpobs_server.analysis.steps.joined_steps import join
from ddpobs_server.analysis.steps.pipeline import slowdown_of, stages_of

from benchmarks.tables import rows_of
from ddpobs.imports.files import read
from ddpobs.imports.traced_run import TracedRun
from ddpobs.whatif.repair import Slowdown
from ddpobs.wire import Steps


def slowdown(trace: Path) -> Slowdown | None:
    """Return what the slow ranks of a trace cost."""
    run = read([trace], trace.stem)
    assert isinstance(run, TracedRun)
    events = [(batch.rank, event) for batch in run.batches() for event in batch.events]
    rank = np.repeat(run.ranks, [len(steps) for steps in run.steps])
    return slowdown_of(stages_of(events), join(rank, Steps.concat(run.steps)))


def main() -> None:
    """Print a row for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--smoke", action="store_true", help="as without: it takes seconds")
    traces = sorted(parser.parse_args().folder.glob("trace-*.parquet"))
    if not traces:
        sys.exit("benchmarks.slowdown: expected trace-*.parquet in the folder, found none")
    rows = []
    for trace in traces:
        name = trace.stem.removeprefix("trace-")
        published = json.loads(trace.with_name(f"result-{name}.json").read_text())["blocking_slowdown"]
        ours = slowdown(trace)
        found = ["not replayed", ""] if ours is None else [f"{ours.total:.4f}", f"{ours.total / published - 1:+.2%}"]
        rows.append([name, f"{published:.4f}", *found])
    print(rows_of(["trace", "published S", "ours", "difference"], rows))


if __name__ == "__main__":
    main()
