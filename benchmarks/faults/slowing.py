"""A training in which rank 1 is slow for a known cause: `python slowing.py CASE`, one process per rank.

Each rank is pinned to a processor of its own, as far as there are enough. `longer` and `lengths` draw lognormal lengths
of the inputs; all other cases use one length. Several cases may be joined, such as `longer+neighbour`.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpobs import DistributedDataParallel

SLOW = 1
STEPS = int(os.environ.get("STEPS", "120"))
ROWS, LENGTH, WIDTH = 8, 256, 128
_SPREAD, _LONGER = 0.25, 2.0
_NEIGHBOURS, _HEAP, _PAGES, _PERIOD_US, _QUOTA_US = 3, 150_000, 512, 20_000, 5_000
CASES = ("balanced", "neighbour", "quota", "garbage", "paging", "work", "lengths", "longer", "longer+neighbour")


def processor_of(rank: int) -> int:
    """Return the processor of a rank."""
    processors = sorted(os.sched_getaffinity(0))
    return processors[rank % len(processors)]


@contextmanager
def busy_neighbours(processor: int) -> Iterator[None]:
    """Keep a processor busy with other processes, which end with this one.

    The kernel moves other programs away from that processor, to those of the other ranks. So one process would slow the
    other ranks as much on a machine that has more to do.
    """
    script = (
        f"import os\nos.sched_setaffinity(0, [{processor}])\nwhile os.getppid() == {os.getpid()}: sum(range(99999))"
    )
    neighbours = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(_NEIGHBOURS)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


@contextmanager
def quota() -> Iterator[None]:
    """Move this process into a control group with a quarter of a processor.

    Raises:
        OSError: This machine lets no process make a control group.
    """
    first = Path("/sys/fs/cgroup/cpu")
    parent = first if first.is_dir() else Path("/sys/fs/cgroup")
    group = parent / f"ddpobs-slowing-{os.getpid()}"
    group.mkdir()
    try:
        if parent == first:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(_QUOTA_US))
        else:
            (group / "cpu.max").write_text(f"{_QUOTA_US} {_PERIOD_US}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def collect_a_big_heap() -> Callable[[], object]:
    """Return a step's work: a full collection, of a heap of many lists."""
    heap: Any = [[] for _ in range(_HEAP)]
    return lambda: (gc.collect(), len(heap))


def read_pages(file: Path) -> Callable[[], object]:
    """Return a step's work: reads of mapped pages that the kernel has dropped."""
    file.write_bytes(os.urandom(_PAGES * mmap.PAGESIZE))
    opened = file.open("rb")
    os.fsync(opened.fileno())

    def read() -> int:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as pages:
            pages.madvise(mmap.MADV_RANDOM)
            return sum(pages[offset] for offset in range(0, len(pages), mmap.PAGESIZE))

    return read


def compute_more() -> Callable[[], object]:
    """Return a step's work: products of matrices."""
    matrix = torch.randn(400, 400)

    def work() -> None:
        for _ in range(8):
            matrix @ matrix

    return work


def prepare(causes: set[str], stack: ExitStack) -> list[Callable[[], object]]:
    """Begin the causes of the slow rank; return the work of each step."""
    if "quota" in causes:
        stack.enter_context(quota())
    if "neighbour" in causes:
        stack.enter_context(busy_neighbours(min(os.sched_getaffinity(0))))
    works = []
    if "garbage" in causes:
        works.append(collect_a_big_heap())
    if "paging" in causes:
        works.append(read_pages(Path(os.environ["OUT"]) / "pages"))
    if "work" in causes:
        works.append(compute_more())
    return works


def lengths(causes: set[str], rank: int) -> Iterator[int]:
    """Yield the length of the inputs of each step."""
    draw = random.Random(rank)
    longer = _LONGER if "longer" in causes and rank == SLOW else 1.0
    while True:
        varies = causes & {"lengths", "longer"}
        yield round(LENGTH * longer * draw.lognormvariate(0, _SPREAD)) if varies else LENGTH


def main() -> None:
    """Train."""
    causes, rank = set(sys.argv[1].split("+")), int(os.environ["RANK"])
    os.sched_setaffinity(0, [processor_of(rank)])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        works = prepare(causes, stack) if rank == SLOW else []
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        model = DistributedDataParallel(nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _, length in zip(range(STEPS), lengths(causes, rank), strict=False):
            loss = model(torch.randn(ROWS, length, WIDTH)).square().mean()
            for work in works:
                work()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.1f} s")
