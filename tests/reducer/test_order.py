"""Every rank has the same order of collectives, whichever parameters it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpobs import DistributedDataParallel
from tests.support.distributed.compare import Case, batch, outcome, result, verdict, verdicts
from tests.support.distributed.launch import run_ranks


class Choice(nn.Module):
    """Equal layers, of which a forward leaves out one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, rows: torch.Tensor, left_out: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            rows = rows if index == left_out else torch.tanh(layer(rows))
        return rows


def in_a_chain(left_out: Any, **options: Any) -> Case:
    """Two modules of one group in each backward; each rank leaves out other layers."""

    def case(kind: Any, rank: int) -> list[torch.Tensor]:
        first, second = (kind(Choice(), find_unused_parameters=True, bucket_cap_mb=1e-4, **options) for _ in range(2))
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            first_left_out, second_left_out = left_out(rank, step)
            second(first(batch(rank, step), first_left_out), second_left_out).pow(2).sum().backward()
            optimizer.step()
        return outcome(first) + outcome(second)

    return case


_APART = "one rank the last, another the first"
CASES: dict[str, Case] = {
    _APART: in_a_chain(lambda rank, _: (3 * rank, 3 - 3 * rank)),
    "one rank none": in_a_chain(lambda rank, _: (9, 3) if rank else (9, 9)),
    "all, skipped": in_a_chain(lambda _, step: (step, 3 - step), skip_all_reduce_unused_params=True),
}
SKIPPED = in_a_chain(lambda rank, _: (3 * rank, 3 - 3 * rank), skip_all_reduce_unused_params=True)


def compared(rank: int, world_size: int) -> dict[str, str]:
    # Torch hangs in this case: the expected result is the result without skipping.
    plain, skipped = (
        result(CASES[_APART], DistributedDataParallel, rank),
        result(SKIPPED, DistributedDataParallel, rank),
    )
    return verdicts(CASES, rank) | {"skipped": verdict(skipped, plain)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_modules_of_one_group_that_leave_out_different_layers_equal_torchs(ranks: int) -> None:
    for found in run_ranks(compared, ranks):
        assert found == dict.fromkeys([*CASES, "skipped"], "equal")
