"""Parameters that start, or stop, to require gradients after wrapping."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from benchmarks.parameter_server import ParameterServer
from ddpobs import DistributedDataParallel
from ddpobs.errors import ModelsDifferError, ReducerError, UnusedParametersError
from tests.support.distributed.compare import close, grad, same
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.streams import cpu_streams, stand_in_stream

pytestmark = pytest.mark.wide

UNFREEZE_AT, STEPS = 3, 7


class Tuned(nn.Module):
    """A frozen backbone with two stages and an embedding, and a head."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(5, 6, sparse=sparse)
        self.first, self.second = nn.Linear(6, 40), nn.Linear(40, 6)
        self.head = nn.Linear(6, 2)
        for frozen in (self.rows, self.first, self.second):
            frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x + self.rows(torch.tensor([1, 1, 3]))).tanh()))  # type: ignore[no-any-return]


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def train(
    rank: int,
    wrap: Callable[[nn.Module], Any],
    *,
    rewraps: bool = False,
    micro_batches: int = 1,
    sparse: bool = True,
    momentum: float = 0.9,
) -> list[Any]:
    """Train, unfreeze everything at a step, and return parameters and gradients after every step."""
    model = Tuned(sparse)
    ddp, results = wrap(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for step in range(STEPS):
        if step == UNFREEZE_AT:
            model.requires_grad_(True)
            if rewraps:
                del ddp
                ddp = wrap(model)
        optimizer.zero_grad()
        for micro in range(micro_batches - 1):
            with ddp.no_sync():
                ddp(batch(rank, 10 * step + micro)).pow(2).mean().backward()
        ddp(batch(rank, 1000 + step)).pow(2).mean().backward()
        optimizer.step()
        results += [p.detach().clone() for p in model.parameters()]
        results += [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]
    return results


def with_hook(hook: Any) -> Callable[[nn.Module], Any]:
    def wrap(model: nn.Module) -> Any:
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, hook)
        return ddp

    return wrap


def torch_with_hook(model: nn.Module) -> Any:
    ddp = TorchDDP(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


PAIRS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any], int]] = {
    "default": (DistributedDataParallel, TorchDDP, 1),
    "accumulated": (DistributedDataParallel, TorchDDP, 3),
    "small buckets": (
        lambda model: DistributedDataParallel(model, bucket_cap_mb=0.0002),
        lambda model: TorchDDP(model, bucket_cap_mb=0.0002),
        1,
    ),
    "views": (
        lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
        lambda model: TorchDDP(model, gradient_as_bucket_view=True),
        2,
    ),
    "find unused": (
        lambda model: DistributedDataParallel(model, find_unused_parameters=True),
        lambda model: TorchDDP(model, find_unused_parameters=True),
        1,
    ),
    "own hook": (with_hook(default_hooks.allreduce_hook), TorchDDP, 1),
    "fp16 hook": (with_hook(default_hooks.fp16_compress_hook), torch_with_hook, 1),
}


def compare_pairs(rank: int, world_size: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    verdicts = {}
    for name, (ours, theirs, micro_batches) in PAIRS.items():
        sparse = name != "fp16 hook"
        expected = train(rank, theirs, rewraps=True, micro_batches=micro_batches, sparse=sparse)
        actual = train(rank, ours, micro_batches=micro_batches, sparse=sparse)
        verdicts[name] = "equal" if same(actual, expected, torch.equal) else "other"
        verdicts[name] = "close" if verdicts[name] == "other" and same(actual, expected, close) else verdicts[name]
        dist.barrier()
    return verdicts


def test_the_results_are_those_of_a_model_wrapped_again_at_that_step() -> None:
    for verdicts in run_ranks(compare_pairs, 2):
        assert verdicts == dict.fromkeys(PAIRS, "equal")


def test_the_results_are_those_of_a_model_wrapped_again_up_to_the_order_of_sums_on_four_ranks() -> None:
    for verdicts in run_ranks(compare_pairs, 4):
        assert {verdicts[name] for name in PAIRS if name != "fp16 hook"} <= {"equal", "close"}, verdicts


STRATEGIES: list[Any] = ["fp16", "bf16", "int8", "topk:0.5", "powersgd:1", ParameterServer]


def train_with_strategies(rank: int, world_size: int) -> dict[Any, list[list[float]]]:
    sums = {}
    for name in STRATEGIES:
        results = train(rank, partial(DistributedDataParallel, comm=name))
        sums[name] = [[float(t.double().sum()), float(t.double().abs().max())] for t in results]
        dist.barrier()
    return sums


def test_every_strategy_reduces_the_added_parameters_alike_on_all_ranks() -> None:
    first, second = run_ranks(train_with_strategies, 2)
    for name in STRATEGIES:
        assert first[name] == second[name], name
        assert all(math.isfinite(value) for row in first[name] for value in row), name


def unfreeze_on_some_ranks(rank: int, world_size: int) -> list[str]:
    model = Tuned()
    ddp = DistributedDataParallel(model)
    errors = []
    for step in range(4):
        if step == 2 and rank == 1:
            model.first.requires_grad_(True)
        if step == 3:
            model.first.requires_grad_(rank == 1)
            model.second.requires_grad_(True)
        try:
            ddp.zero_grad()
            ddp(batch(rank, step)).pow(2).mean().backward()
        except ModelsDifferError as error:
            errors.append(str(error))
    model.first.requires_grad_(True)
    model.second.requires_grad_(True)
    ddp.zero_grad()
    ddp(batch(rank, 5)).pow(2).mean().backward()
    errors.append(str(float(grad(model.first.weight).double().sum())))
    return errors


def test_every_rank_gets_the_names_if_the_ranks_differ_and_training_may_go_on() -> None:
    first, *others = run_ranks(unfreeze_on_some_ranks, 3)
    assert all(other == first for other in others)
    assert "none (rank 0, 2); first.weight, first.bias (rank 1)" in first[0]
    assert "first.weight, first.bias, second.weight, second.bias (rank 1)" in first[1]


def freeze_on_some_ranks(rank: int, world_size: int) -> list[str]:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    ddp = DistributedDataParallel(model)
    errors = []
    for step in range(4):
        model[0].requires_grad_(step not in {1, 2} or (step == 1 and rank == 0))
        try:
            ddp(batch(rank, step)).pow(2).mean().backward()
        except UnusedParametersError as error:
            errors.append(str(error))
        ddp.zero_grad()
    return errors


def test_parameters_that_stop_to_require_gradients_are_named_on_every_rank() -> None:
    for errors in run_ranks(freeze_on_some_ranks, 2):
        assert "0.bias (rank 1); 0.weight (rank 1)" in errors[0]
        assert "0.weight (rank 0, 1)" in errors[1]
        assert len(errors) == 2


def unfreeze_a_static_graph(rank: int, world_size: int) -> str:
    model = Tuned()
    ddp = DistributedDataParallel(model, static_graph=True)
    ddp(batch(rank, 0)).pow(2).mean().backward()
    model.requires_grad_(True)
    with pytest.raises(ReducerError) as caught:
        ddp(batch(rank, 1)).pow(2).mean().backward()
    return str(caught.value)


def test_a_static_graph_raises_torchs_phrase_with_the_names() -> None:
    for message in run_ranks(unfreeze_a_static_graph, 2):
        assert "Your training graph has changed in this iteration" in message
        assert "first.weight" in message


def swap_stages(rank: int, world_size: int) -> list[float]:
    """Freeze the head, which alone was trained, and unfreeze a stage."""
    model = Tuned()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(4):
        if step == 2:
            model.head.requires_grad_(False)
            model.second.requires_grad_(True)
        ddp.zero_grad()
        ddp(batch(rank, step)).pow(2).mean().backward()
    return [float(grad(model.second.weight).double().sum())]


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_added_parameters_are_reduced_when_all_others_are_frozen() -> None:
    first, second = run_ranks(swap_stages, 2)
    assert first == second


def use_on_one_rank(rank: int, world_size: int) -> list[Any]:
    """The second stage is unfrozen, but only rank 0 uses it; the embedding takes part nowhere."""
    model = Tuned()

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.never = model, nn.Linear(2, 2)
            self.never.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return model(x) if rank == 0 else model.head(x)  # type: ignore[no-any-return]

    outer = Skipping()
    ddp = DistributedDataParallel(outer, find_unused_parameters=True)
    sums = []
    for step in range(3):
        if step:
            outer.requires_grad_(True)
        ddp.zero_grad()
        ddp(batch(rank, step)).pow(2).mean().backward()
        sums.append([None if p.grad is None else float(p.grad.to_dense().double().sum()) for p in outer.parameters()])
    return sums


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_a_rank_without_a_gradient_gets_that_of_the_others() -> None:
    first, second = run_ranks(use_on_one_rank, 2)
    assert first == second
    assert first[1][-1] is None
    assert first[1][2] is not None


def uneven(rank: int, world_size: int) -> list[float]:
    model = Tuned()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddp.join():
        for step in range(3 + 3 * rank):
            if step == 2:
                model.first.requires_grad_(True)
            if step == 4:
                model.second.requires_grad_(True)
            optimizer.zero_grad()
            ddp(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
    return [float(p.double().sum()) for p in model.parameters()]


def test_added_parameters_are_reduced_under_join() -> None:
    """Rank 0 is out of data when rank 1 unfreezes the second stage: both get the error, not a hang."""
    with pytest.raises(AssertionError, match="parameters started to require gradients") as caught:
        run_ranks(uneven, 2)
    assert "none (rank 0); second.weight, second.bias (rank 1)" in str(caught.value)


def record_events(rank: int, world_size: int) -> tuple[list[Any], list[tuple[int, int]]]:
    with sending() as sent:
        model = Tuned()
        ddp = DistributedDataParallel(model, telemetry=sent.config)
        for step in range(STEPS):
            if step == UNFREEZE_AT:
                model.requires_grad_(True)
            ddp.zero_grad()
            ddp(batch(rank, step)).pow(2).mean().backward()
        logged = ddp._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
    added = [event for b in sent.batches for event in b.events if event.kind == "parameters_added"]
    spans = list(zip(sent.spans("step"), sent.spans("revision"), strict=True))
    return [(event.step, event.detail["parameters"], event.detail["count"], logged) for event in added], spans


def test_the_added_parameters_are_an_event_and_a_new_layout() -> None:
    for events, spans in run_ranks(record_events, 2):
        ((step, names, count, logged),) = events
        assert (step, count, logged) == (UNFREEZE_AT, 5, 7)
        assert names == "rows.weight, first.weight, first.bias, second.weight, second.bias"
        by_step = {s: {r for t, r in spans if t == s} for s, _ in spans}
        assert max(by_step[UNFREEZE_AT]) < min(by_step[UNFREEZE_AT + 1])
        assert all(len(revisions) == 1 for revisions in by_step.values())


def train_with_optimizers_in_backward(rank: int, world_size: int) -> list[bool]:
    """Optimizers that run in the communication hook, as `_apply_optimizer_in_backward` installs them."""
    same_as_plain = []
    for views in (False, True):
        plain = train(rank, DistributedDataParallel, momentum=0.0, sparse=False)[-14:-7]
        model = Tuned(sparse=False)
        model.requires_grad_(True)  # A frozen parameter takes no hook.
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        for frozen in (model.rows, model.first, model.second):
            frozen.requires_grad_(False)
        with stand_in_stream():
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
            for step in range(STEPS):
                if step == UNFREEZE_AT:
                    model.requires_grad_(True)
                ddp(batch(rank, 1000 + step)).pow(2).mean().backward()
        same_as_plain.append(same([p.detach() for p in model.parameters()], plain, close))
    return same_as_plain


def test_optimizers_in_backward_step_on_the_added_parameters() -> None:
    for same_as_plain in run_ranks(train_with_optimizers_in_backward, 2):
        assert same_as_plain == [True, True]


def train_with_mixed_precision(rank: int, world_size: int) -> list[float]:
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with cpu_streams():
        results = train(rank, lambda model: DistributedDataParallel(model, mixed_precision=precision), sparse=False)
    assert {tensor.dtype for tensor in results} == {torch.float32}
    return [float(tensor.double().sum()) for tensor in results]


def test_mixed_precision_reduces_the_added_parameters() -> None:
    first, second = run_ranks(train_with_mixed_precision, 2)
    assert first == second
    assert first[7 * UNFREEZE_AT] != first[-7]
