"""Starts its own two ranks with the start method in the first argument (spawn, forkserver or fork).

Torch is imported only in the ranks. Each rank counts ddpobs's threads in itself and in a loader's worker.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from typing import Any

STEPS = 4


def telemetry_threads() -> int:
    return sum("ddpobs" in thread.name for thread in threading.enumerate())


class Rows:
    """Rows that contain the number of ddpobs's threads in the process that reads them."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((2,), float(telemetry_threads()))


def rank(number: int, store: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    class UserDDP(DistributedDataParallel):
        """A user's subclass of torch's class."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__(module)
            self.is_user_class = True

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    model = UserDDP(torch.nn.Linear(2, 1))
    in_workers = 0.0
    dataset: Any = Rows()
    for rows in DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork"):
        in_workers += float(rows.sum())
        model(rows).sum().backward()
    sys.stdout.write(f"rank {number}: {telemetry_threads()} threads, {in_workers:.0f} in workers\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    context: Any = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=rank, args=(number, sys.argv[2])) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if "torch" in sys.modules:
        sys.exit("torch was imported in a process without training")
    sys.exit(os.EX_OK if all(process.exitcode == 0 for process in ranks) else 1)
