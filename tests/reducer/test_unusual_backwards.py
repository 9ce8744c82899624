"""Unusual backwards: a clear error, or reduced gradients."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel
from ddpobs.errors import ConfigError, ReducerError
from ddpobs.reducer import fault_broadcast
from tests.support.distributed.compare import CAP, batch, grad, net
from tests.support.distributed.interrupts import StopError, make_interruptible
from tests.support.distributed.launch import run_ranks


def errors_of_mistakes(rank: int, world_size: int) -> list[str]:
    """Return the error of each mistake. Rank 0 also has a copy of a module."""
    messages = []
    first = DistributedDataParallel(net())
    if rank == 0:
        copy.deepcopy(first)
    for mistake in ("converted", "converted in part", "unused", "replaced"):
        ddp = DistributedDataParallel(net(), **CAP)
        if mistake == "converted":
            ddp.double()
        if mistake == "converted in part":
            ddp.module[4].double().register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
        inputs = batch(rank).to(next(ddp.parameters()).dtype)
        if mistake == "unused" and rank == 0:
            ddp.module[4].bias = None
        if mistake == "replaced":
            ddp.load_state_dict(copy.deepcopy(ddp.state_dict()), assign=True)
        with pytest.raises(ReducerError) as error:
            ddp(inputs).sum().backward()
        messages.append(str(error.value))
    return messages


def test_gradients_that_cannot_be_reduced_raise_the_same_clear_error_on_every_rank() -> None:
    first, second = run_ranks(errors_of_mistakes, 2)
    assert first == second
    converted, in_part, unused, replaced = first
    assert "0.weight was torch.float32 on cpu" in converted
    assert "4.weight was torch.float32 on cpu" in in_part
    assert "is torch.float64 on cpu now" in in_part
    assert "4.bias (rank 0)" in unused
    assert "rank 0: 6 parameters, " in replaced
    assert "were replaced after DistributedDataParallel was built" in replaced


def forward_without_backward(rank: int, world_size: int) -> list[bool]:
    """Return whether torch's gradients, and ours, are local to the rank after a pass under `no_sync`."""
    plain, are_local = net(), []
    plain(batch(rank, 1)).sum().backward()
    for kind in (TorchDDP, DistributedDataParallel):
        ddp = kind(net(), **CAP)
        ddp(batch(rank))
        with ddp.no_sync():
            ddp(batch(rank, 1)).sum().backward()
        pairs = zip(ddp.module.parameters(), plain.parameters(), strict=True)
        are_local.append(all(torch.equal(grad(ours), grad(theirs)) for ours, theirs in pairs))
    return are_local


def test_no_sync_holds_after_a_forward_that_had_no_backward() -> None:
    assert run_ranks(forward_without_backward, 2) == [[False, True]] * 2


class KeepAlive(torch.autograd.Function):
    """An identity that keeps an object alive in the graph, like activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, activations: Any) -> torch.Tensor:
        ctx.activations = activations
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        return slope, None


def graphs_freed(rank: int, world_size: int) -> list[bool]:
    """Return whether a graph is freed with its output: without a backward, and after a failed backward."""
    freed = []
    for fails in (False, True):
        ddp = DistributedDataParallel(WithActivations(), **CAP)
        make_interruptible(ddp, 0)[0] = fails
        activations = nn.Module()
        alive = weakref.ref(activations)
        output = ddp(batch(rank), activations)
        if fails:
            with pytest.raises(StopError):
                output.sum().backward()
        del output, activations
        freed.append(alive() is None)
    return freed


class WithActivations(nn.Sequential):
    """A network with a graph that keeps the given activations alive."""

    def __init__(self) -> None:
        super().__init__(*net())

    def forward(self, x: torch.Tensor, activations: Any) -> torch.Tensor:  # type: ignore[override]
        return KeepAlive.apply(super().forward(x), activations)  # type: ignore[no-any-return, no-untyped-call]


def test_a_graph_without_a_backward_is_freed_with_its_output() -> None:
    """Otherwise a script could not free memory after it ran out of it."""
    assert run_ranks(graphs_freed, 2) == [[True, True]] * 2


def means_of_two_backwards(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, bool]:
    """Return for two kinds of double backward whether the gradients are the mean over the ranks."""
    are_means = {}
    for kind in ("two forwards", "backward twice"):
        ddp, plain = DistributedDataParallel(net(), **CAP, **options), net()
        for _ in range(3):
            ddp.zero_grad()
            losses = [ddp(batch(rank, step)).sum() for step in range(2 if kind == "two forwards" else 1)]
            for loss in losses * 2 if len(losses) == 1 else losses:
                loss.backward(retain_graph=True)
        for data_rank in range(world_size):
            for step in (0, 1) if kind == "two forwards" else (0, 0):
                (plain(batch(data_rank, step)).sum() / world_size).backward()
        pairs = zip(ddp.parameters(), plain.parameters(), strict=True)
        are_means[kind] = all(torch.allclose(grad(ours), grad(theirs), atol=1e-5) for ours, theirs in pairs)
    return are_means


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "flag"])
def test_every_backward_after_a_forward_is_reduced(options: dict[str, Any]) -> None:
    assert run_ranks(means_of_two_backwards, 2, options) == [{"two forwards": True, "backward twice": True}] * 2


def unreduced_gradients(rank: int, world_size: int) -> tuple[list[str], list[bool]]:
    """Delete the wrapper before the backward, or remove its hooks.

    Returns:
        The errors after a deletion, and whether the gradients without hooks equal torch's, by step.
    """
    messages: list[str] = []
    for keeps_reducer in (False, True):  # A reference to the reducer does not keep the wrapper alive.
        ddp = DistributedDataParallel(net(), **CAP)
        reducer, loss = ddp.reducer if keeps_reducer else None, ddp(batch(rank)).sum()
        del ddp
        with pytest.raises(ReducerError) as error:
            loss.backward()
        messages.append(str(error.value))
        del reducer, error
    ours, theirs = (kind(net(), **CAP) for kind in (DistributedDataParallel, TorchDDP))
    same = []
    for step in range(3):
        for wrapper in (ours, theirs):
            if step == 1:
                wrapper.reducer._remove_autograd_hooks()
            wrapper.zero_grad()
            wrapper(batch(rank, step)).sum().backward()
        same.append(all(map(torch.equal, gradients(ours), gradients(theirs))))
    return messages, same


def gradients(ddp: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]


def test_unreduced_gradients_are_an_error_unless_the_user_removed_the_hooks() -> None:
    for messages, same in run_ranks(unreduced_gradients, 2):
        assert all("was deleted after the forward" in message for message in messages)
        assert same == [True] * 3


def reduced_twice(rank: int, world_size: int) -> list[str]:
    """Enable torch's compiled reducer, which registers its own hooks."""
    from torch._dynamo import config

    with config.patch(optimize_ddp="python_reducer"), pytest.raises(ConfigError) as error:
        DistributedDataParallel(net(), **CAP)
    return [error.value.setting, str(error.value.actual)]


def test_torchs_compiled_reducer_beside_ours_is_refused() -> None:
    assert run_ranks(reduced_twice, 1) == [["torch._dynamo.config.optimize_ddp", "python_reducer"]]


def errors_in_two_groups(rank: int, _world_size: int) -> list[list[str]]:
    """Raise a fault, then use NaN gradients in a second group with the same name and store."""
    raised: list[list[str]] = []
    for leaves_out in (True, False):
        # Torchrun's store outlives the group. The next group counts from zero again.
        fault_broadcast._numbers.clear()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ddp = DistributedDataParallel(model)
        if leaves_out and rank == 1:
            model.forward = model[0].forward  # type: ignore[method-assign]
        raised.append([])
        try:
            ddp(torch.full((2, 4), 1.0 if leaves_out else float("nan"))).sum().backward()
        except ReducerError as error:
            raised[-1].append(type(error).__name__)
    return raised


def test_a_fault_of_an_earlier_group_is_not_raised_again() -> None:
    assert run_ranks(errors_in_two_groups, 2) == [[["UnusedParametersError"], []]] * 2


def compiled_autograd(rank: int, world_size: int) -> tuple[str, int, bool]:
    """Return the refusal, the number of open backwards, and whether a plain backward then gives equal gradients."""
    ddp = DistributedDataParallel(net())
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="eager")
        def step(rows: torch.Tensor) -> None:
            ddp(rows).sum().backward()

        with pytest.raises(ReducerError) as raised:
            step(batch(rank))
    torch._dynamo.reset()
    left = len(ddp.reducer._open)
    ddp.zero_grad()
    ddp(batch(rank)).sum().backward()
    gradient = next(ddp.parameters()).grad
    assert gradient is not None
    gathered = [torch.empty_like(gradient) for _ in range(world_size)]
    dist.all_gather(gathered, gradient)
    return str(raised.value), left, all(torch.equal(gradient, gathered_gradient) for gathered_gradient in gathered)


def test_a_backward_under_compiled_autograd_is_refused() -> None:
    for refusal, open_backwards, is_equal in run_ranks(compiled_autograd, 2):
        assert "compiled autograd" in refusal
        assert open_backwards == 0
        assert is_equal
