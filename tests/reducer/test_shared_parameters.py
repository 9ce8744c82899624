"""A parameter that two DDP modules reduce in one backward: a shared layer, or a DDP module inside another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddpobs import DistributedDataParallel
from ddpobs.errors import ReducerError
from tests.support.distributed.compare import batch, net
from tests.support.distributed.launch import run_ranks

SMALL: dict[str, Any] = {"bucket_cap_mb": 1e-5}
FLAG: dict[str, Any] = {"find_unused_parameters": True}


class Outer(nn.Module):
    """Layers around a wrapped module."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.first, self.last = inner, nn.Linear(8, 8), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))  # type: ignore[no-any-return]


def build_pair(kind: Any, **options: Any) -> list[Any]:
    """Wrap two networks that share a weight and a bias."""
    first, second = net(), net()
    second[2].weight, second[0].bias = first[2].weight, first[0].bias
    return [kind(module, **options) for module in (first, second)]


def gradients(*modules: nn.Module) -> Iterator[torch.Tensor | None]:
    for parameter in dict.fromkeys(parameter for module in modules for parameter in module.parameters()):
        yield None if parameter.grad is None else parameter.grad.clone()


def reduce_to_twice_the_mean(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return twice the mean, so that the result shows how often the hook ran."""
    work = dist.all_reduce(buffer * (2 / dist.get_world_size()), async_op=True)
    twice: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda sums: sums.value()[0])
    return twice


def doubling_hook() -> Any:
    return lambda state, bucket: reduce_to_twice_the_mean(bucket.buffer())


def together(set_to_none: bool = True, hook: Any = None, accumulates: bool = False, **options: Any) -> Any:
    """Run one backward through both models. Before the second, run a backward of each model."""

    def case(kind: Any, rank: int) -> Any:
        models = build_pair(kind, **options)
        results: list[torch.Tensor | None] = []
        for model in models if hook else ():
            model.register_comm_hook(None, hook)
        for step in range(4):
            for number, model in enumerate(models):
                if not accumulates or step % 2:
                    model.zero_grad(set_to_none=set_to_none)
                if step == 1:
                    model(batch(rank, 50 + number)).pow(2).sum().backward()
            losses = [model(batch(rank, 10 * step + number)).sum() for number, model in enumerate(models)]
            (losses[0] * losses[1]).backward()
            results += gradients(*models)
        return results

    return case


def nested(hook: Any = None, **options: Any) -> Any:
    def case(kind: Any, rank: int) -> Any:
        inner = kind(net(), **options)
        ddp = kind(Outer(inner), **options)
        results: list[torch.Tensor | None] = []
        for model in (inner, ddp) if hook else ():
            model.register_comm_hook(None, hook)
        for step in range(4):
            ddp.zero_grad(set_to_none=step % 2 == 0)
            ddp(batch(rank, step)).pow(2).sum().backward()
            results += gradients(ddp)
        return results

    return case


class Alternating(nn.Module):
    """A layer that each rank uses in every second step, the two ranks in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.always, self.sometimes, self.step = nn.Linear(8, 2), nn.Linear(8, 2), dist.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        y: torch.Tensor = self.always(x)
        return y + self.sometimes(x) if self.step % 2 else y


def memory_reference(kind: Any, rank: int) -> Any:
    """Read gradients through a reference to their first memory, which is zeroed in place."""
    inner = kind(Alternating(), **FLAG)
    ddp, memory, results = kind(Outer(inner), **FLAG), None, []
    for step in range(5):
        ddp.zero_grad(set_to_none=step == 0)
        ddp(batch(rank, step)).pow(2).sum().backward()
        gradient = inner.module.sometimes.weight.grad
        memory = gradient.data if memory is None else memory
        results += [memory.clone(), gradient.clone()]
    return results


CASES = {
    "together": together(),
    "together, small buckets": together(**SMALL),
    "together, zeroed in place": together(set_to_none=False),
    "together, zeroed in place, small buckets": together(set_to_none=False, **SMALL),
    "together, accumulated": together(accumulates=True),
    "together, by hooks": together(hook=default_hooks.allreduce_hook),
    "together, flag": together(**FLAG, **SMALL),
    "nested": nested(),
    "nested, small buckets": nested(**SMALL),
    "nested, flag": nested(**FLAG),
    "nested, flag, memory reference": memory_reference,
    "nested, static": nested(static_graph=True),
    "nested, by hooks that double": nested(hook=doubling_hook(), **SMALL),
}


CLOSE = {name for name in CASES if name.startswith("nested")}
"""May differ on four ranks: each module sums the same gradients in its own buckets, and the last sum is kept."""


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_torch(verdicts_by_rank: list[dict[str, str]], case: str) -> None:
    allowed = {"equal", "close"} if case in CLOSE and len(verdicts_by_rank) > 2 else {"equal"}
    assert {verdict[case] for verdict in verdicts_by_rank} <= allowed


def equal_with_views(rank: int, world_size: int) -> bool:
    """Compare gradients that are bucket views with copies, on our DDP alone: torch refuses this case."""
    views = {"gradient_as_bucket_view": True}
    pairs = ((together(**views), together()), (nested(**views), nested()))
    return all(
        all(map(torch.equal, with_views(DistributedDataParallel, rank), plain(DistributedDataParallel, rank)))
        for with_views, plain in pairs
    )


def test_gradients_as_bucket_views_have_the_same_values() -> None:
    assert all(run_ranks(equal_with_views, 2))


class HidingOutput(nn.Module):
    """A module with an opaque output, in which DDP finds no tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        class Hidden:
            value = self.module(x)

        return Hidden()


def error_with_a_hidden_output(rank: int, world_size: int) -> str:
    """Share a layer between two modules, one with an opaque output. The layer's gradients are copied on arrival."""
    layer = nn.Linear(8, 2000)
    visible, hidden = DistributedDataParallel(layer), DistributedDataParallel(HidingOutput(layer))
    with pytest.raises(ReducerError) as error:
        (visible(batch(rank)).sum() + hidden(batch(rank, 1)).value.sum()).backward()
    return str(error.value)


def test_a_shared_layer_behind_a_hidden_output_is_an_error_on_every_rank() -> None:
    for text in run_ranks(error_with_a_hidden_output, 2):
        assert "rank 1: two DistributedDataParallel modules reduce parameter module." in text
