"""What users do between forward and backward, beyond one of each: gradients are those of torch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ddpobs import DistributedDataParallel
from ddpobs.errors import ReducerError
from tests.distributed.launch import run_ranks

CAP = {"bucket_cap_mb": 0.05}
STEPS = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    wide = 200  # Buckets are above `buckets.COPY_ON_ARRIVAL_ELEMENTS` or below, as they are capped.
    return nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 2))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def penalty(ddp: Any, rank: int, step: int) -> None:
    inputs = batch(rank, step).requires_grad_()
    output = ddp(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    (output.mean() + slope.pow(2).mean()).backward()


def asked_for_parameters(ddp: Any, rank: int, step: int) -> None:
    output = ddp(batch(rank, step))
    torch.autograd.grad(output.sum(), list(ddp.parameters()), retain_graph=True)
    output.mean().backward()


def inputs_only(ddp: Any, rank: int, step: int) -> None:
    inputs = batch(rank, step).requires_grad_()
    ddp(inputs).sum().backward(inputs=[inputs])
    ddp(batch(rank, step)).sum().backward()


def evaluated_in_between(ddp: Any, rank: int, step: int) -> None:
    loss = ddp(batch(rank, step)).sum()
    with torch.no_grad():
        ddp(batch(rank, step + 50))
    loss.backward()


def frozen_for_a_while(ddp: Any, rank: int, step: int) -> None:
    ddp.requires_grad_(False)
    ddp(batch(rank, step).requires_grad_()).sum().backward()
    ddp.requires_grad_(True)
    ddp(batch(rank, step)).sum().backward()


def two_forwards(ddp: Any, rank: int, step: int) -> None:
    (ddp(batch(rank, step)).sum() + ddp(batch(rank, step + 50)).sum()).backward()


def checkpointed(ddp: Any, rank: int, step: int) -> None:
    checkpoint(ddp, batch(rank, step).requires_grad_(), use_reentrant=False).sum().backward()


def checkpointed_reentrant(ddp: Any, rank: int, step: int) -> None:
    checkpoint(ddp, batch(rank, step).requires_grad_(), use_reentrant=True).sum().backward()


def armed_under_no_sync(ddp: Any, rank: int, step: int) -> None:
    """As pipeline stages and Accelerate's `trigger_sync_in_backward` do."""
    with ddp.no_sync():
        first, last = ddp(batch(rank, step)), ddp(batch(rank, step + 50))
        first.sum().backward()
    ddp.reducer.prepare_for_backward([])
    last.sum().backward()


def armed_with_outputs(ddp: Any, rank: int, step: int) -> None:
    with ddp.no_sync():
        output = ddp(batch(rank, step))
    ddp.reducer.prepare_for_backward([output])
    output.sum().backward()


class Manual(nn.Module):
    """Two backward passes within one forward, as Lightning's manual optimisation runs them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.ddp: list[Any] = []

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> None:
        for inputs in (first, second):
            loss = self.net(inputs).sum()
            (ddp,) = self.ddp
            ddp.reducer._rebuild_buckets()
            ddp.reducer.prepare_for_backward([])
            loss.backward()


def manual_backwards(kind: Any, rank: int) -> torch.Tensor:
    ddp = kind(Manual(net()), **CAP)
    ddp.module.ddp.append(ddp)
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(batch(rank, step), batch(rank, step + 50))
    return torch.cat([p.grad.flatten() for p in ddp.module.net.parameters()])


PATTERNS = {
    function.__name__: function
    for function in (
        penalty,
        asked_for_parameters,
        inputs_only,
        evaluated_in_between,
        frozen_for_a_while,
        two_forwards,
        checkpointed,
        checkpointed_reentrant,
        armed_under_no_sync,
        armed_with_outputs,
    )
}


def gradients(ddp: Any, step: Callable[[Any, int, int], None], rank: int) -> torch.Tensor:
    for number in range(STEPS):
        ddp.zero_grad()
        step(ddp, rank, number)
    return torch.cat([p.grad.flatten() for p in ddp.parameters()])


def all_patterns(rank: int, world_size: int) -> dict[str, str]:
    if world_size > 2:  # Sums over more ranks depend on the layout, and torch's first is one bucket.
        CAP.clear()
    return {name: verdict(function, rank) for name, function in PATTERNS.items()}


def verdict(step: Callable[[Any, int, int], None], rank: int) -> str:
    theirs = gradients(TorchDDP(net(), **CAP), step, rank)
    try:
        ours = gradients(DistributedDataParallel(net(), **CAP), step, rank)
    except RuntimeError as error:
        return str(error)
    return "equal" if torch.equal(ours, theirs) else "different"


@pytest.fixture(scope="module", params=[2, 4])
def verdicts(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_ranks(all_patterns, request.param)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_those_of_torch_ddp(verdicts: list[dict[str, str]], pattern: str) -> None:
    assert {verdict[pattern] for verdict in verdicts} == {"equal"}


def asked_of_a_static_graph(rank: int, world_size: int) -> list[bool]:
    """Whether gradients are those without `static_graph`, by step. With it torch reduces nothing, and says nothing."""
    found: list[list[list[torch.Tensor]]] = []
    for static in (False, True):
        ddp = DistributedDataParallel(net(), **CAP, static_graph=static)
        found.append([])
        for step in range(STEPS):
            ddp.zero_grad()
            asked_for_parameters(ddp, rank, step)
            found[-1].append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
    return [all(map(torch.equal, *gradients)) for gradients in zip(*found, strict=True)]


def test_a_static_graph_may_be_asked_for_gradients_before_its_first_backward() -> None:
    assert run_ranks(asked_of_a_static_graph, 2) == [[True] * STEPS] * 2


def manual(rank: int, world_size: int) -> bool:
    return torch.equal(manual_backwards(DistributedDataParallel, rank), manual_backwards(TorchDDP, rank))


def test_each_of_two_backwards_within_a_forward_is_reduced_where_it_is_asked_for() -> None:
    assert run_ranks(manual, 2) == [True, True]


class Skipping(nn.Module):
    """Reaches none of its parameters where the batch begins with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) if bool(x[0, 0] > 0) else x * 2  # type: ignore[no-any-return]


def skips_all(rank: int, step: int) -> torch.Tensor:
    inputs = batch(rank, step)
    inputs[0, 0] = 1.0 if (rank + step) % 2 else -1.0
    return inputs.requires_grad_()


def no_parameter_reached(rank: int, world_size: int) -> list[bool]:
    """With the flag, whether each step's gradients are half of those of the one rank that reached parameters."""
    ddp = DistributedDataParallel(Skipping(), find_unused_parameters=True, **CAP)
    alone = Skipping()
    same = []
    for step in range(STEPS):
        for module in (ddp, alone):
            module.zero_grad()
        ddp(skips_all(rank, step)).sum().backward()
        alone(skips_all((1 + step) % 2, step)).sum().backward()
        pairs = zip(ddp.module.parameters(), alone.parameters(), strict=True)
        same.append(all(torch.allclose(p.grad, q.grad / 2) for p, q in pairs))
    return same


def test_a_loss_that_reaches_no_parameter_on_one_rank_still_takes_part() -> None:
    assert run_ranks(no_parameter_reached, 2, timeout_s=40) == [[True] * STEPS] * 2


def no_parameter_reached_without_the_flag(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(Skipping(), **CAP)
    try:
        ddp(skips_all(rank, 0)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_without_the_flag_it_is_the_same_error_on_every_rank() -> None:
    first, second = run_ranks(no_parameter_reached_without_the_flag, 2, timeout_s=40)
    assert first == second
    assert "net.0.weight (rank 0)" in first


def first_reaches_nothing(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[int], bool]:
    """Rank 0 reaches no parameter in the first backward: the steps that raised, and whether the last one is torch's."""
    ddp, theirs = DistributedDataParallel(Skipping(), **CAP, **options), TorchDDP(Skipping(), **CAP)
    told = []
    for step in range(3):
        ddp.zero_grad()
        inputs = batch(rank, step)
        inputs[0, 0] = -1.0 if rank == step == 0 else 1.0
        try:
            ddp(inputs.requires_grad_()).sum().backward()
        except ReducerError:
            told.append(step)
    theirs(inputs).sum().backward()
    pairs = zip(ddp.parameters(), theirs.parameters(), strict=True)
    return told, all(torch.allclose(p.grad, q.grad) for p, q in pairs)


def test_a_first_backward_that_reaches_nothing_on_one_rank_is_an_error_after_which_all_go_on() -> None:
    assert run_ranks(first_reaches_nothing, 2, {}, timeout_s=20) == [([0], True)] * 2


def test_a_first_backward_of_a_static_graph_that_reaches_nothing_on_one_rank_hangs_nobody() -> None:
    (told, _), _ = run_ranks(first_reaches_nothing, 2, {"static_graph": True}, timeout_s=20)
    assert told == [1, 2], "the graph changed"


def interrupted(rank: int, world_size: int) -> list[int]:
    """An error in the first backward; then steps on, and the parameters' places in the rebuilt buckets."""

    class StopError(Exception):
        pass

    def stop(_: torch.Tensor) -> None:
        raise StopError

    ddp = DistributedDataParallel(net(), **CAP)
    handle = ddp.module[0].weight.register_hook(stop)
    with pytest.raises(StopError):
        ddp(batch(rank)).sum().backward()
    handle.remove()
    for step in range(STEPS):
        two_forwards(ddp, rank, step)
    return sorted(member for bucket in ddp.reducer.core.buckets for member in bucket.members)


def test_training_goes_on_after_a_backward_that_failed_on_every_rank() -> None:
    assert run_ranks(interrupted, 2) == [list(range(6))] * 2


def layouts(rank: int, world_size: int) -> list[tuple[list[int], list[int]]]:
    """Ours and torch's rebuilt bucket sizes."""
    found = []
    for options in ({}, CAP, {"bucket_cap_mb_list": [1]}):
        ours, theirs = DistributedDataParallel(net(), **options), TorchDDP(net(), **options)
        for ddp in (ours, theirs):
            for _ in range(2):
                two_forwards(ddp, rank, 0)
        sizes = theirs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        found.append((ours.reducer.bucket_bytes, [int(size) for size in sizes.split(",")]))
    return found


def test_rebuilt_buckets_are_torchs() -> None:
    for ours, theirs in run_ranks(layouts, 1)[0]:
        assert ours == theirs
