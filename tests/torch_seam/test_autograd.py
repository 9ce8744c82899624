"""The autograd seam, as far as it needs no process group."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeated_forward_is_recognised_with_the_kind_of_its_checkpoint(reentrant: bool) -> None:
    repetitions: list[bool | None] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        repetitions.append(autograd.is_repetition_reentrant())
        return x.sin()

    output = checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
    assert isinstance(output, torch.Tensor)
    output.sum().backward()
    assert repetitions == [None, reentrant]
