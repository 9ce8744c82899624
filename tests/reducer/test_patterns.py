"""Unusual calls between forward and backward: gradients are equal to torch's DDP."""

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
from tests.support.distributed.compare import CAP, grad
from tests.support.distributed.launch import run_ranks

STEPS = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    wide = 200  # Depending on their cap, buckets are above or below `buckets.COPY_ON_ARRIVAL_ELEMENTS`.
    return nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 2))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def penalty(ddp: Any, rank: int, step: int) -> None:
    inputs = batch(rank, step).requires_grad_()
    output = ddp(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    (output.mean() + slope.pow(2).mean()).backward()


def grad_of_parameters(ddp: Any, rank: int, step: int) -> None:
    output = ddp(batch(rank, step))
    torch.autograd.grad(output.sum(), list(ddp.parameters()), retain_graph=True)
    output.mean().backward()


def backward_to_inputs_only(ddp: Any, rank: int, step: int) -> None:
    inputs = batch(rank, step).requires_grad_()
    ddp(inputs).sum().backward(inputs=[inputs])
    ddp(batch(rank, step)).sum().backward()


def evaluation_before_backward(ddp: Any, rank: int, step: int) -> None:
    loss = ddp(batch(rank, step)).sum()
    with torch.no_grad():
        ddp(batch(rank, step + 50))
    loss.backward()


def temporarily_frozen(ddp: Any, rank: int, step: int) -> None:
    ddp.requires_grad_(False)
    ddp(batch(rank, step).requires_grad_()).sum().backward()
    ddp.requires_grad_(True)
    ddp(batch(rank, step)).sum().backward()


def two_forwards(ddp: Any, rank: int, step: int) -> None:
    (ddp(batch(rank, step)).sum() + ddp(batch(rank, step + 50)).sum()).backward()


def checkpoint_without_reentry(ddp: Any, rank: int, step: int) -> None:
    checkpoint(ddp, batch(rank, step).requires_grad_(), use_reentrant=False).sum().backward()


def reentrant_checkpoint(ddp: Any, rank: int, step: int) -> None:
    checkpoint(ddp, batch(rank, step).requires_grad_(), use_reentrant=True).sum().backward()


def prepared_under_no_sync(ddp: Any, rank: int, step: int) -> None:
    """Pipeline stages and Accelerate's `trigger_sync_in_backward` do this."""
    with ddp.no_sync():
        first, last = ddp(batch(rank, step)), ddp(batch(rank, step + 50))
        first.sum().backward()
    ddp.reducer.prepare_for_backward([])
    last.sum().backward()


def prepared_with_outputs(ddp: Any, rank: int, step: int) -> None:
    with ddp.no_sync():
        output = ddp(batch(rank, step))
    ddp.reducer.prepare_for_backward([output])
    output.sum().backward()


class Manual(nn.Module):
    """Runs two backward passes within one forward, like Lightning's manual optimization."""

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
        grad_of_parameters,
        backward_to_inputs_only,
        evaluation_before_backward,
        temporarily_frozen,
        two_forwards,
        checkpoint_without_reentry,
        reentrant_checkpoint,
        prepared_under_no_sync,
        prepared_with_outputs,
    )
}


def gradients(ddp: Any, step: Callable[[Any, int, int], None], rank: int) -> torch.Tensor:
    for number in range(STEPS):
        ddp.zero_grad()
        step(ddp, rank, number)
    return torch.cat([p.grad.flatten() for p in ddp.parameters()])


def all_patterns(rank: int, world_size: int) -> dict[str, str]:
    if world_size > 2:  # Sums over more ranks depend on the layout, and torch's first layout has one bucket.
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


def static_graph_after_autograd_grad(rank: int, world_size: int) -> list[bool]:
    """Return whether gradients are equal to those without `static_graph`, by step.

    Torch's DDP reduces nothing in this case, without an error.
    """
    gradients: list[list[list[torch.Tensor]]] = []
    for static in (False, True):
        ddp = DistributedDataParallel(net(), **CAP, static_graph=static)
        gradients.append([])
        for step in range(STEPS):
            ddp.zero_grad()
            grad_of_parameters(ddp, rank, step)
            gradients[-1].append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
    return [all(map(torch.equal, *pair)) for pair in zip(*gradients, strict=True)]


def test_a_static_graph_allows_autograd_grad_before_its_first_backward() -> None:
    assert run_ranks(static_graph_after_autograd_grad, 2) == [[True] * STEPS] * 2


def manual(rank: int, world_size: int) -> bool:
    return torch.equal(manual_backwards(DistributedDataParallel, rank), manual_backwards(TorchDDP, rank))


def test_each_of_two_prepared_backwards_within_a_forward_is_reduced() -> None:
    assert run_ranks(manual, 2) == [True, True]


class Skipping(nn.Module):
    """Uses none of its parameters if the batch begins with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) if bool(x[0, 0] > 0) else x * 2


def skipping_batch(rank: int, step: int) -> torch.Tensor:
    inputs = batch(rank, step)
    inputs[0, 0] = 1.0 if (rank + step) % 2 else -1.0
    return inputs.requires_grad_()


def no_parameter_reached(rank: int, world_size: int) -> list[bool]:
    """With the flag, whether each step's gradients are half of the gradients of the only rank that used parameters."""
    ddp = DistributedDataParallel(Skipping(), find_unused_parameters=True, **CAP)
    alone = Skipping()
    same = []
    for step in range(STEPS):
        for module in (ddp, alone):
            module.zero_grad()
        ddp(skipping_batch(rank, step)).sum().backward()
        alone(skipping_batch((1 + step) % 2, step)).sum().backward()
        pairs = zip(ddp.module.parameters(), alone.parameters(), strict=True)
        same.append(all(torch.allclose(grad(p), grad(q) / 2) for p, q in pairs))
    return same


def test_a_loss_that_reaches_no_parameter_on_one_rank_still_takes_part() -> None:
    assert run_ranks(no_parameter_reached, 2) == [[True] * STEPS] * 2


def no_parameter_reached_without_the_flag(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(Skipping(), **CAP)
    try:
        ddp(skipping_batch(rank, 0)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_without_the_flag_every_rank_raises_the_same_error() -> None:
    first, second = run_ranks(no_parameter_reached_without_the_flag, 2)
    assert first == second
    assert "net.0.weight (rank 0)" in first


def first_reaches_nothing(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[int], bool]:
    """Rank 0 uses no parameter in the first backward.

    Returns:
        The steps that raised, and whether the last step's gradients are equal to torch's.
    """
    ddp, theirs = DistributedDataParallel(Skipping(), **CAP, **options), TorchDDP(Skipping(), **CAP)
    failed_steps = []
    for step in range(3):
        ddp.zero_grad()
        inputs = batch(rank, step)
        inputs[0, 0] = -1.0 if rank == step == 0 else 1.0
        try:
            ddp(inputs.requires_grad_()).sum().backward()
        except ReducerError:
            failed_steps.append(step)
    theirs(inputs).sum().backward()
    pairs = zip(ddp.parameters(), theirs.parameters(), strict=True)
    return failed_steps, all(torch.allclose(grad(p), grad(q)) for p, q in pairs)


def test_training_goes_on_after_a_first_backward_that_used_no_parameter_on_one_rank() -> None:
    assert run_ranks(first_reaches_nothing, 2, {}) == [([0], True)] * 2


def test_a_first_backward_of_a_static_graph_that_uses_no_parameter_on_one_rank_does_not_hang() -> None:
    (failed_steps, _), _ = run_ranks(first_reaches_nothing, 2, {"static_graph": True})
    assert failed_steps == [1, 2], "the graph changed"


def error_in_first_backward(rank: int, world_size: int) -> list[int]:
    """Raise in the first backward and continue; return the parameters' indexes in the rebuilt buckets."""

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
    assert run_ranks(error_in_first_backward, 2) == [list(range(6))] * 2


def layouts(rank: int, world_size: int) -> list[tuple[list[int], list[int]]]:
    """Return our and torch's rebuilt bucket sizes."""
    sizes = []
    for options in ({}, CAP, {"bucket_cap_mb_list": [1]}):
        ours, theirs = DistributedDataParallel(net(), **options), TorchDDP(net(), **options)
        for ddp in (ours, theirs):
            for _ in range(2):
                two_forwards(ddp, rank, 0)
        torch_sizes = theirs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        sizes.append((ours.reducer.bucket_bytes, [int(size) for size in torch_sizes.split(",")]))
    return sizes


def test_rebuilt_buckets_have_torchs_sizes() -> None:
    for ours, theirs in run_ranks(layouts, 1)[0]:
        assert ours == theirs
