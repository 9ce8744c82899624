"""The autograd seam, as far as it needs no process group."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from ddpobs.torch_seam import autograd


def test_hooks_on_several_threads_run_one_at_a_time() -> None:
    """A hook may call another hook, as the first gradient of a backward does."""
    inside: list[int] = []
    most: list[int] = []

    def hook(tensor: torch.Tensor) -> None:
        inside.append(1)
        most.append(len(inside))
        if tensor.item() == 0:
            locked(torch.ones(()))
        time.sleep(0.01)  # Releases the GIL, as a launch does.
        inside.pop()

    locked = autograd.serialize(hook, threading.RLock())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(locked, [torch.zeros(())] + [torch.ones(())] * 7))
    assert sorted(most) == [1] * 8 + [2]
