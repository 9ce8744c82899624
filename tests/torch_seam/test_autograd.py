"""What is asked of the autograd engine, where no process group is needed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from ddpobs.torch_seam import autograd


def test_hooks_on_several_threads_run_one_at_a_time() -> None:
    """One of them calls another, as the first gradient of a backward begins it."""
    inside: list[int] = []
    most: list[int] = []

    def hook(tensor: torch.Tensor) -> None:
        inside.append(1)
        most.append(len(inside))
        if tensor.item() == 0:
            locked(torch.ones(()))
        time.sleep(0.01)  # As a launch does, it lets go of the interpreter.
        inside.pop()

    locked = autograd.serialize(hook, threading.RLock())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(locked, [torch.zeros(())] + [torch.ones(())] * 7))
    assert sorted(most) == [1] * 8 + [2]
