"""Complex gradients, which torch passes to communication hooks as pairs of real numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.support.distributed.compare import train


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn, self.shift = (nn.Parameter(torch.randn(8, dtype=torch.complex64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.turn + self.shift).abs()


def hooked(hook: Any, **options: Any) -> Any:
    def case(kind: Any, rank: int) -> Any:
        ddp = kind(Complex(), **options)
        ddp.register_comm_hook(None, hook)
        return [torch.view_as_real(tensor) for tensor in train(ddp, rank, 3)]

    return case


def new_mean(_state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and no postponed ones
    """A typical user's hook: the result is not the bucket's tensor."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda sums: sums.value()[0] / dist.get_world_size())


CASES = {
    "all-reduce": hooked(default_hooks.allreduce_hook),
    "fp16": hooked(default_hooks.fp16_compress_hook, gradient_as_bucket_view=True),
    "a new tensor": hooked(new_mean),
}


@pytest.mark.parametrize("case", CASES)
def test_hooks_have_the_same_result_as_in_torch(verdicts_by_rank: list[dict[str, str]], case: str) -> None:
    assert {verdict[case] for verdict in verdicts_by_rank} == {"equal"}
