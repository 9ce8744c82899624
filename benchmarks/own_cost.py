"""Do intervals from blocks of steps hold 1 where both arms are the same, and what does telemetry measure of itself?

    python -m benchmarks.own_cost [--intervals 100] [--cycles 40] [--cycle 256] [--small]

Two gloo ranks train a small model.

- Turns, rests: share of A/A intervals that hold 1, out of so many; 95 % are expected.
- Cost: what a training with `rest_every` reports about itself. `python -m benchmarks.overhead` measures the same from
  outside, as a ratio of two trainings that take turns.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.tables import rows_of
from ddpobs import DistributedDataParallel, TelemetryConfig, telemetry
from ddpobs.shared.paired_blocks import PairedRatio, Ratio, Rests, TimedStep, Turns

_RANKS, _WIDTH, _LAYERS, _ROWS = 2, 256, 8, 64
_BLOCK_STEPS, _PAIRS = 8, 8


def _stepping(config: TelemetryConfig | bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)))
    ddp = DistributedDataParallel(model, telemetry=config)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    batch = torch.randn(_ROWS, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()
        optimizer.step()

    return step


def _intervals(step: Callable[[], None], arm: Callable[[int], int], pair_steps: int, wanted: int) -> list[Ratio]:
    """Intervals of arms that are the same; the arms of a pair follow from the number of the step."""
    number, found = count(pair_steps), []  # The first cycle has no rest.
    for _ in range(wanted):
        paired = PairedRatio()
        for _ in range(_PAIRS):
            paired.add([_timed(step, arm(next(number))) for _ in range(pair_steps)])
        estimate = paired.estimate()
        assert estimate is not None
        found.append(estimate)
    return found


def _timed(step: Callable[[], None], arm: int) -> TimedStep:
    began_ns = time.perf_counter_ns()
    step()
    return TimedStep(arm, time.perf_counter_ns() - began_ns)


def _rank_main(rank: int, folder: str, options: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    plain = _stepping(False)
    for _ in range(50):
        plain()
    turns, rests = Turns(_BLOCK_STEPS, seed=0), Rests(options.cycle)
    of_turns = _intervals(plain, turns.arm, turns.group_steps, options.intervals)
    of_rests = _intervals(plain, lambda step: int(rests.rests(step)), options.cycle, max(1, options.intervals // 10))
    config = TelemetryConfig(collector="http://127.0.0.1:9", spool=folder, rest_every=options.cycle, quiet=True)
    recorded = _stepping(config)
    for _ in range(options.cycle * (options.cycles + 2)):
        recorded()
    process = telemetry._process
    assert process is not None
    process._journal.entries.catch_up(1.0)
    cost = process._flow.own_cost
    measured = None if cost is None else cost.estimate()
    if rank == 0:
        rows = [[name, _held(found)] for name, found in (("A/A, turns", of_turns), ("A/A, rests", of_rests))]
        text = "not known" if measured is None else f"{measured.ratio:.4f} [{measured.low:.4f}, {measured.high:.4f}]"
        print(rows_of(["measurement", "result"], [*rows, [f"cost, {options.cycles} cycles", text]]), flush=True)
    dist.barrier()
    process.close()
    dist.destroy_process_group()


def _held(found: list[Ratio]) -> str:
    held = sum(interval.low <= 1 <= interval.high for interval in found)
    width = sum(interval.high - interval.low for interval in found) / len(found)
    return f"{held} of {len(found)} intervals hold 1; mean width {100 * width:.1f} %"


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--intervals", type=int, default=100)
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--cycle", type=int, default=256, help="steps of a cycle")
    parser.add_argument("--small", action="store_true", help="few intervals: does it work?")
    options = parser.parse_args()
    if options.small:
        options.intervals, options.cycles, options.cycle = 3, 7, 64
    with tempfile.TemporaryDirectory() as folder:
        context = get_context("spawn")
        ranks = [context.Process(target=_rank_main, args=(rank, folder, options)) for rank in range(_RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if codes := [process.exitcode for process in ranks if process.exitcode]:
            raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
