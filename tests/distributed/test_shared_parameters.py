"""A parameter that two modules reduce in one backward: a layer they share, or a module inside the other one."""

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
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks

SMALL = {"bucket_cap_mb": 1e-5}
FLAG = {"find_unused_parameters": True}


class Around(nn.Module):
    """A wrapped module and a layer; the module may be left out."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.first, self.last = inner, nn.Linear(8, 8), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))  # type: ignore[no-any-return]


def two(kind: Any, **options: Any) -> list[Any]:
    first, second = net(), net()
    second[2].weight, second[0].bias = first[2].weight, first[0].bias
    return [kind(module, **options) for module in (first, second)]


def gradients(*modules: nn.Module) -> Iterator[Any]:
    for parameter in dict.fromkeys(parameter for module in modules for parameter in module.parameters()):
        yield None if parameter.grad is None else parameter.grad.clone()


def doubled(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Twice the mean: it shows how often it ran."""
    work = dist.all_reduce(buffer * (2 / dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda sums: sums.value()[0])


def doubling() -> Any:
    return lambda state, bucket: doubled(bucket.buffer())


def together(set_to_none: bool = True, hook: Any = None, accumulates: bool = False, **options: Any) -> Any:
    """One backward through both; before the second one a backward of each."""

    def case(kind: Any, rank: int) -> Any:
        models, found = two(kind, **options), []
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
            found += gradients(*models)
        return found

    return case


def nested(hook: Any = None, **options: Any) -> Any:
    def case(kind: Any, rank: int) -> Any:
        inner = kind(net(), **options)
        ddp, found = kind(Around(inner), **options), []
        for model in (inner, ddp) if hook else ():
            model.register_comm_hook(None, hook)
        for step in range(4):
            ddp.zero_grad(set_to_none=step % 2 == 0)
            ddp(batch(rank, step)).pow(2).sum().backward()
            found += gradients(ddp)
        return found

    return case


class Turns(nn.Module):
    """A layer that one rank uses in a step, and another one in the next."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.always, self.sometimes, self.step = nn.Linear(8, 2), nn.Linear(8, 2), dist.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        y: torch.Tensor = self.always(x)
        return y + self.sometimes(x) if self.step % 2 else y


def held(kind: Any, rank: int) -> Any:
    """What a script sees that took a gradient's memory once, and zeroes it in place."""
    inner = kind(Turns(), **FLAG)
    ddp, memory, found = kind(Around(inner), **FLAG), None, []
    for step in range(5):
        ddp.zero_grad(set_to_none=step == 0)
        ddp(batch(rank, step)).pow(2).sum().backward()
        gradient = inner.module.sometimes.weight.grad
        memory = gradient.data if memory is None else memory
        found += [memory.clone(), gradient.clone()]
    return found


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
    "nested, flag, held": held,
    "nested, static": nested(static_graph=True),
    "nested, by hooks that double": nested(hook=doubling(), **SMALL),
}


CLOSE = {name for name in CASES if name.startswith("nested")}
"""On four ranks: each module sums the same gradients, in buckets of its own cut, and the one that ends last is kept."""


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_torch(found: list[dict[str, str]], case: str) -> None:
    allowed = {"equal", "close"} if case in CLOSE and len(found) > 2 else {"equal"}
    assert {verdict[case] for verdict in found} <= allowed


def as_views(rank: int, world_size: int) -> bool:
    """Torch refuses this."""
    views = {"gradient_as_bucket_view": True}
    pairs = ((together(**views), together()), (nested(**views), nested()))
    return all(
        all(map(torch.equal, one(DistributedDataParallel, rank), other(DistributedDataParallel, rank)))
        for one, other in pairs
    )


def test_gradients_that_may_be_views_are_the_same() -> None:
    assert all(run_ranks(as_views, 2))


class Hiding(nn.Module):
    """What it gives cannot be looked into."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        class Hidden:
            value = self.module(x)

        return Hidden()


def told(rank: int, world_size: int) -> str:
    """A layer of two modules, one of which gives no outputs that could be watched; its gradients go in one by one."""
    layer = nn.Linear(8, 2000)
    seen, hidden = DistributedDataParallel(layer), DistributedDataParallel(Hiding(layer))
    with pytest.raises(ReducerError) as error:
        (seen(batch(rank)).sum() + hidden(batch(rank, 1)).value.sum()).backward()
    return str(error.value)


def test_where_it_cannot_be_right_it_is_an_error_on_every_rank() -> None:
    for text in run_ranks(told, 2):
        assert "rank 1: two DistributedDataParallel modules reduce parameter module." in text
