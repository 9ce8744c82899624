"""The work of which each rank measures the rate: on its processor or GPU, its memory, its disk and its links.

Each measure lasts for a window of time, however slow the host is, and all ranks begin it together.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ddpobs.launch.host_check.order import ALL_REDUCE, DISK, EXCHANGE, MATRIX, MEMORY


@dataclass(frozen=True)
class Sizes:
    """Amount of one operation, which a processor or a GPU does in some milliseconds.

    Attributes:
        matrix: Rows and columns of a matrix.
        dtype: Type of its elements.
        memory_bytes: Size of a copy, beyond the caches.
        message_bytes: Size of a message between ranks.
    """

    matrix: int
    dtype: torch.dtype
    memory_bytes: int
    message_bytes: int


ON_CPU = Sizes(512, torch.float32, 64 * 2**20, 2**20)
ON_GPU = Sizes(8192, torch.bfloat16, 2**30, 32 * 2**20)
_DISK_BYTES = 4 * 2**20


class Measures(AbstractContextManager["Measures"]):
    """The measures of this rank.

    Args:
        device: Where it computes.
        folder: Folder for the disk writes; the file has no name and one block, written again and again.
        fabric: Group of all ranks over which data are exchanged; None for the default group, over which CPUs do.
        partners: Partner of this rank in each round; None in a round without one.

    Attributes:
        failures: By measure, why its rate is not known.
    """

    def __init__(
        self, device: torch.device, folder: str, fabric: dist.ProcessGroup | None, partners: list[int | None]
    ) -> None:
        self._device, self._fabric, self._partners = device, fabric, partners
        sizes = ON_CPU if device.type == "cpu" else ON_GPU
        self._local: dict[int, Callable[[], float]] = {}
        self.failures: dict[int, str] = {}
        self._file = -1
        prepared: dict[int, Callable[[], Callable[[], float]]] = {
            MATRIX: partial(self._matrix_products, sizes),
            MEMORY: partial(self._memory_copies, sizes),
            DISK: partial(self._disk_writes, folder),
        }
        for measure, prepare in prepared.items():
            with _noting_failure(self.failures, measure):
                self._local[measure] = prepare()
        carrier = device if fabric is not None else torch.device("cpu")
        self._sent, self._received = (torch.zeros(sizes.message_bytes // 4, device=carrier) for _ in range(2))

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def rate(self, measure: int, window_s: float) -> float:
        """Measure for that long together with all ranks; returns operations or bytes a second, NaN if not known."""
        if measure == EXCHANGE:
            rates = [self._exchange(partner, window_s / len(self._partners)) for partner in self._partners]
            return max((rate for rate in rates if not math.isnan(rate)), default=math.nan)
        dist.barrier()
        if measure == ALL_REDUCE:
            return self._all_reduce(window_s)
        with _noting_failure(self.failures, measure):
            if measure not in self.failures:
                return _rate(self._local[measure], window_s)
        return math.nan

    def _matrix_products(self, sizes: Sizes) -> Callable[[], float]:
        matrix = torch.randn(sizes.matrix, sizes.matrix, device=self._device).to(sizes.dtype)
        product = torch.empty_like(matrix)

        def multiply() -> float:
            torch.mm(matrix, matrix, out=product)
            self._synchronise()
            return 2.0 * sizes.matrix**3

        return multiply

    def _memory_copies(self, sizes: Sizes) -> Callable[[], float]:
        source = torch.ones(sizes.memory_bytes // 4, device=self._device)
        target = torch.empty_like(source)

        def copy() -> float:
            target.copy_(source)
            self._synchronise()
            return float(sizes.memory_bytes)

        return copy

    def _disk_writes(self, folder: str) -> Callable[[], float]:
        block = os.urandom(_DISK_BYTES)  # A file system may compress.
        with tempfile.TemporaryFile(dir=folder) as file:
            self._file = os.dup(file.fileno())

        def write() -> float:
            written = os.pwrite(self._file, block, 0)
            os.fdatasync(self._file)
            return float(written)

        return write

    def _exchange(self, partner: int | None, window_s: float) -> float:
        """Exchange messages with a rank; the one with the lower number says in each message whether another follows."""
        dist.barrier()
        if partner is None:
            return math.nan
        leads, began, count = dist.get_rank() < partner, time.perf_counter(), 0
        while True:
            self._sent[0] = float(time.perf_counter() - began < window_s)
            operations = [(dist.isend, self._sent), (dist.irecv, self._received)]
            batch = [dist.P2POp(operation, tensor, partner, self._fabric) for operation, tensor in operations]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            count += 1
            if not (self._sent if leads else self._received)[0].item():
                return count * self._sent.nbytes / (time.perf_counter() - began)

    def _all_reduce(self, window_s: float) -> float:
        """All-reduce messages; rank 0 says in each whether another follows. Returns the bus bandwidth.

        Source: nccl-tests, `busbw = bytes / time · 2 (n - 1) / n`.
        """
        ranks, began, count = dist.get_world_size(), time.perf_counter(), 0
        while True:
            self._sent[0] = float(dist.get_rank() == 0 and time.perf_counter() - began < window_s)
            dist.all_reduce(self._sent, group=self._fabric)
            count += 1
            if not self._sent[0].item():
                break
        seconds = time.perf_counter() - began
        return count * self._sent.nbytes / seconds * 2 * (ranks - 1) / ranks

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)


@contextmanager
def _noting_failure(failures: dict[int, str], measure: int) -> Iterator[None]:
    """Note an error of a rank's own work. The other ranks wait at the next measure, so this one goes on."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        failures[measure] = str(error).partition("\n")[0] or type(error).__name__


def _rate(work: Callable[[], float], window_s: float) -> float:
    """Repeat the work until the window is over; returns the amount a second."""
    began, amount = time.perf_counter(), 0.0
    while True:
        amount += work()
        if (took := time.perf_counter() - began) >= window_s:
            return amount / took
