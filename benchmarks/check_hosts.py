"""Count how often `ddpobs check-hosts` names the slow rank, and how often it names one of ranks that are alike.

    python -m benchmarks.check_hosts [--times 20] [--seconds 10] [--json FILE] [--smoke]

Two ranks have a processor each. In every case but the first, a busy process shares that of rank 1: by its niceness it
takes about a tenth, a quarter or half of the time, so that rank 1 is slower by about 1.1×, 1.33× or 2×. The limit is
1.2×. The cases take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.rig.training import ROOT
from ddpobs.launch.host_check.order import SLOW_HOST

CASES = {"alike": None, "a tenth": 10, "a quarter": 5, "half": 0}
"""Niceness of the busy process by its part of the processor."""
_SLOW = 1
_BUSY = "import os\nwhile os.getppid() == {parent}: sum(range(100_000))"


@contextmanager
def _neighbour(niceness: int | None, processor: int) -> Iterator[None]:
    """Keep a processor busy; not with a niceness of None."""
    if niceness is None:
        yield
        return
    command = ["taskset", "-c", str(processor), "nice", "-n", str(niceness), sys.executable, "-c"]
    process = subprocess.Popen([*command, _BUSY.format(parent=os.getpid())])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def named(case: str, seconds: float, folder: Path) -> str:
    """Check the ranks once, and return those that are named; `none` if there is none.

    Raises:
        RuntimeError: The hosts were not compared.
    """
    processors = sorted(os.sched_getaffinity(0))[:2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    pinned = 'taskset -cp $([ "$RANK" = 0 ] && echo $0 || echo $1) $BASHPID >/dev/null; exec "$2" -c pass'
    rank = ["bash", "-c", pinned, *map(str, processors), sys.executable]
    check = [sys.executable, "-m", "ddpobs.cli", "check-hosts", "--seconds", str(seconds), "--disk", str(folder)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DDPOBS_SPOOL": str(folder / "spool")}
    with _neighbour(CASES[case], processors[_SLOW]):
        done = subprocess.run([*check, "--", *launch, *rank], env=environ, capture_output=True, text=True, check=False)
    if done.returncode not in (0, SLOW_HOST) or "ddpobs: checked " not in done.stderr:
        raise RuntimeError(f"{case}: exit status {done.returncode}\n{done.stderr}")
    found = set(re.findall(r"^ddpobs: slow host .*\(rank (\d):", done.stderr, re.MULTILINE))
    return ", ".join(sorted(found)) or "none"


def main() -> None:
    """Run the cases in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="once, for a second")
    options = parser.parse_args()
    times, seconds = (1, 1.0) if options.smoke else (options.times, options.seconds)
    counts: dict[str, Counter[str]] = {case: Counter() for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            for case in CASES:
                counts[case][named(case, seconds, Path(folder))] += 1
    print("| the busy process takes | named rank 1 | named rank 0 | named both | named none | checks |")
    print("|---|---|---|---|---|---|")
    for case, count in counts.items():
        columns = [count[ranks] for ranks in ("1", "0", "0, 1", "none")]
        print(f"| {case} | {' | '.join(map(str, columns))} | {times} |")
    if options.json:
        options.json.write_text(json.dumps(counts, indent=2) + "\n")


if __name__ == "__main__":
    main()
