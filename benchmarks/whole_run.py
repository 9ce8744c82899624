"""Measure a collector's answers about a whole run of a million steps by 1,024 ranks, over HTTP.

    python -m benchmarks.whole_run [--steps 1000000] [--ranks 1024] [--times 20] [--postgres] [--json FILE] [--smoke]

The run's bins of 1,024 steps and more are written as the collector makes them, and its latest steps' columns. No answer
about so many steps reads finer bins. Rank 5 was slow in backward in a tenth of the run. A pulse arrives before each
diagnosis, so that no cached answer is used. The last row is the collector's peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from ddpobs_server.analysis.steps.step_bins import NAMES, TIMES, StepBins, merged_bins, over_ranks
from ddpobs_server.store import Store
from ddpobs_server.store.sums.stored_bins import BLOCK_RANKS, FACTOR, LEVELS, OVER_RANKS, packed, width

from benchmarks import capacity, reads
from benchmarks.rig import databases
from ddpobs import wire

RUN = "whole"
FINEST_LEVEL = 2
_MS = 1_000_000
_STEP_NS, _EXCESS_NS = 100 * _MS, 20 * _MS
_SLOW_RANK = 5
_BOUNDS_MS = {"points of all ranks together": 100.0, "points of one rank": 100.0, "diagnostics": 1000.0}


def bins(number: int, level: int, size: tuple[int, int], random: np.random.Generator) -> StepBins:
    """Return a bin of a run of `size`, (ranks, steps); in the middle tenth of the run one rank is slow."""
    ranks, steps = size
    table = np.zeros((len(NAMES), ranks), np.int64)
    first = number * width(level)
    count = min(width(level), steps - first)
    is_slow = (np.arange(ranks) == _SLOW_RANK) & (0.45 <= first / steps < 0.55)
    excess_ns = is_slow * _EXCESS_NS
    values: dict[str, Any] = {
        "rank": np.arange(ranks),
        "first": first,
        "last": first + count - 1,
        "steps": count,
        "began_ns": (first - steps) * _STEP_NS,
        "ended_ns": (first - steps + count) * _STEP_NS,
        "compared": count,
        "time_ns": count * _STEP_NS,
        "late": np.where(is_slow, count, random.integers(0, count // 20 + 1, ranks)),
        "excess_ns": excess_ns + random.normal(0, _MS, ranks).astype(np.int64),
        "late_backward_ns": excess_ns * count,
    }
    late = np.asarray(values["late"])
    values |= dict.fromkeys(("cost_ns", "lost_ns"), late * np.where(is_slow, _EXCESS_NS, 11 * _MS))
    for name in TIMES:
        base = _STEP_NS if name == "wall" else _STEP_NS // len(wire.PHASES)
        typical = base + random.integers(-_MS, _MS, ranks)
        values |= {f"{name}_min_ns": typical * 9 // 10, f"{name}_median_ns": typical, f"{name}_max_ns": typical * 3}
    for name, value in values.items():
        table[NAMES.index(name)] = value
    return StepBins(np.full(ranks, number, np.int64), table)


def write(store: Store, attempt: str, level: int, part: StepBins) -> None:
    """Write bins with all their blocks."""
    summary, rank = over_ranks(part), part.column("rank")
    rows = []
    for number in np.unique(part.number).tolist():
        rows.append(packed(number, OVER_RANKS, 1, summary.table[:, summary.number == number]))
        here, blocks = part.number == number, range(int(rank.max()) // BLOCK_RANKS + 1)
        rows += [packed(number, block, 1, part.table[:, here & (rank // BLOCK_RANKS == block)]) for block in blocks]
    store.write_step_bins(RUN, attempt, level, rows)


def fill(store: Store, ranks: int, steps: int, level: int) -> reads.Shape:
    """Write the run: the columns of its latest steps, and the bins of all, of that level and wider."""
    shape = reads.Shape(RUN, ranks, steps, 2, 40)
    last = shape.load.batches
    keys = [(rank, seq) for seq in range(max(0, last - 13), last) for rank in range(ranks)]
    for begin in range(0, len(keys), 64):
        store.ingest([reads.arrival(reads.batch(shape, rank, seq)) for rank, seq in keys[begin : begin + 64]])
    sum(store.compact(0))
    run = store.run(RUN)
    assert run is not None
    random = np.random.default_rng(0)
    parts = [bins(number, level, (ranks, steps), random) for number in range(-(-steps // width(level)))]
    for wider in range(level, LEVELS):
        for begin in range(0, len(parts), 16):
            write(store, run.attempt, wider, StepBins.concat(parts[begin : begin + 16]))
        if len(parts) == 1:
            break
        groups = [parts[begin : begin + FACTOR] for begin in range(0, len(parts), FACTOR)]
        parts = [merged_bins(StepBins.concat(group), FACTOR) for group in groups]
    return shape


def requests() -> dict[str, str]:
    """Return the paths by title."""
    api = f"/api/v1/runs/{RUN}"
    return {
        "points of all ranks together": f"{api}/steps?points=1000&mean=true",
        "points of one rank": f"{api}/steps?points=1000&rank=7",
        "points of each rank, a page": f"{api}/steps?points=1000",
        "diagnostics": f"{api}/diagnostics",
        "diagnostics of a tenth": f"{api}/diagnostics?from=450000&to=549999",
    }


def peak_mb(pid: int) -> float:
    """Return a process's largest resident memory so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e3


def measure(
    url: str, folder: Path, shape: reads.Shape, times: int
) -> tuple[dict[str, list[float]], dict[str, float], float, str]:
    """Return the milliseconds of each request, those of the processor, the peak memory in MB, and a finding's title."""
    by_title: dict[str, list[float]] = {title: [] for title in requests()}
    processor_ms = dict.fromkeys(by_title, 0.0)
    title = ""
    with (
        capacity.collector(folder, url) as (process, address),
        httpx.Client(base_url=address, timeout=300) as client,
    ):
        for name, path in requests().items():
            answer = client.get(path).raise_for_status().json()
            print(f"{name}: {len(answer.get('columns', {}).get('first', []))} bins")
        for _ in range(times):
            for name, path in requests().items():
                seq = time.time_ns() // _MS
                pulse = msgspec.structs.replace(reads.batch(shape, 0, 1), seq=seq, steps=None, spans=None)
                ingest = f"/api/v1/runs/{RUN}/sources/{pulse.source}/batches/{seq}"
                client.put(ingest, content=wire.encode(pulse), headers={"Content-Type": wire.MSGPACK})
                before_s, began = reads.processor_s(process.pid), time.perf_counter()
                answer = client.get(path).raise_for_status()
                by_title[name].append((time.perf_counter() - began) * 1e3)
                processor_ms[name] += (reads.processor_s(process.pid) - before_s) * 1e3 / times
                if name == "diagnostics":
                    found = [f["title"] for f in answer.json()["findings"] if f["ranks"] == [_SLOW_RANK]]
                    title = found[0] if found else "the slow rank was not named"
        return by_title, processor_ms, peak_mb(process.pid), title


def main() -> None:
    """Write the run, measure, and print a row for each read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--times", type=int, default=20, help="repetitions of each request")
    parser.add_argument("--postgres", action="store_true", help="use a new PostgreSQL server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.ranks, options.times = 10_000, 12, 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(databases.postgresql())(folder) if options.postgres else databases.sqlite(folder)
        store = Store(url)
        store.migrate()
        shape = fill(store, options.ranks, options.steps, 0 if options.smoke else FINEST_LEVEL)
        store.close()
        by_title, processor_ms, memory_mb, title = measure(url, folder, shape, options.times)
    print(
        f"\n| {options.steps:,} steps by {options.ranks:,} ranks | median, ms | p99, ms | bound, ms | processor, ms |"
    )
    print("|---|---|---|---|---|")
    for name, milliseconds in by_title.items():
        bound = f"{_BOUNDS_MS[name]:.0f}" if name in _BOUNDS_MS else ""
        times_ms = f"{statistics.median(milliseconds):.1f} | {np.percentile(milliseconds, 99):.1f}"
        row = f"{times_ms} | {bound} | {processor_ms[name]:.1f}"
        print(f"| {name} | {row} |")
    print(f"| the collector's peak memory, MB | {memory_mb:.0f} | | | |\n\n{title}")
    if options.json:
        medians = {name: statistics.median(milliseconds) for name, milliseconds in by_title.items()}
        results = {"median_ms": medians, "processor_ms": processor_ms, "peak_mb": memory_mb}
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
