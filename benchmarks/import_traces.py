"""Measure how fast traces of torch.profiler are read, against Python's own JSON reader, which keeps the whole document.

    .venv/bin/python -m benchmarks.import_traces TRACE... [--rounds 5]

Both read the same file in turns, in one process. The table has the events read per second of processor time, in the
median of the rounds, and how many times as many ddpobs reads.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from ddpobs.imports import kineto

GZIP = b"\x1f\x8b"


def whole(path: Path) -> Any:
    """Read a document as one object."""
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if content.startswith(GZIP) else content)


def took_s(read: Callable[[Path], object], path: Path) -> float:
    """Return the processor time of reading a file."""
    began = time.process_time()
    read(path)
    return time.process_time() - began


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one round")
    options = parser.parse_args()
    print("| trace | events | ddpobs, events/s | json, events/s | times as many |\n|---|---|---|---|---|")
    for path in options.traces:
        events = len(whole(path)["traceEvents"])
        seconds: dict[Any, list[float]] = {kineto.read: [], whole: []}
        for _ in range(1 if options.smoke else options.rounds):
            for read, taken in seconds.items():
                taken.append(took_s(read, path))
        ours, theirs = (events / median(taken) for taken in seconds.values())
        print(f"| {path.name} | {events:,} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.1f} |")
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
