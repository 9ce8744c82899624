"""Layers that all ranks drop in a step: equal to `find_unused_parameters` of torch, without its messages."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ddpobs import DistributedDataParallel, LayerDrop
from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import AllReduce
from ddpobs.errors import ConfigError, ReducerError
from tests.support.distributed.compare import Case, batch, outcome, verdicts
from tests.support.distributed.dropping import Stack, draw
from tests.support.distributed.interrupts import StopError
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending

LAYER_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.0002}
"""Each layer's weight and bias are a bucket."""
TWO_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.001}
"""Dropped and kept layers share a bucket."""
STEPS = 8


def wrapped(kind: Any, module: nn.Module, **options: Any) -> Any:
    """Wrap it; torch's DDP has to find the unused parameters."""
    return kind(module, **options, **({"find_unused_parameters": True} if kind is TorchDDP else {}))


def train(ddp: Any, rank: int, steps: int = STEPS, set_to_none: bool = True, accumulate: int = 0) -> list[Any]:
    """Train with momentum: a parameter without a gradient stays where it is, one with a zero gradient moves on."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    results: list[Any] = []
    for step in range(steps):
        draw(ddp, step)
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(accumulate):
            with ddp.no_sync():
                ddp(batch(rank, 100 * part + step)).pow(2).mean().backward()
        ddp(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
        results.append([outcome(ddp), [p.grad is None for p in ddp.parameters()]])
    return results


def whole_buckets(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(), **LAYER_BUCKETS), rank)


def parts_of_buckets(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(), **TWO_BUCKETS), rank)


def one_bucket(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack()), rank)


def accumulated(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(), **LAYER_BUCKETS), rank, accumulate=2)


def gradients_stay(kind: Any, rank: int) -> Any:
    """Without zeroing by None, a dropped layer keeps its gradient of the step before, which is zero."""
    return train(wrapped(kind, Stack(), **LAYER_BUCKETS), rank, set_to_none=False)


def gradients_are_never_zeroed(kind: Any, rank: int) -> Any:
    ddp = wrapped(kind, Stack(), **TWO_BUCKETS)
    for step in range(STEPS):
        draw(ddp, step)
        ddp(batch(rank, step)).sum().backward()
    return outcome(ddp)


def views(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(), gradient_as_bucket_view=True, **TWO_BUCKETS), rank)


class Wide(nn.Module):
    """Layers of 1 MiB, which one bucket of the default cap would hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = LayerDrop((nn.Linear(512, 512) for _ in range(4)), 0.5, seed=3)
        self.first, self.last = nn.Linear(8, 512), nn.Linear(512, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.first(x)))  # type: ignore[no-any-return]


def large_layers(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Wide()), rank)


def nearly_all_dropped(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Stack(probability=0.9), **LAYER_BUCKETS), rank)


class Shared(Stack):
    """A weight in two layers, and one that a layer shares with the rest of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight
        self.first.weight = self.layers[2].weight


def shared_weights(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Shared(), **LAYER_BUCKETS), rank)


class Nested(nn.Module):
    """A LayerDrop inside a layer of another one; both run by a call, and by slices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        inner = LayerDrop([nn.Linear(8, 8), nn.Linear(8, 8)], 0.4, seed=8)
        self.layers = LayerDrop([nn.Linear(8, 8), inner, nn.Tanh(), nn.Linear(8, 8)], 0.4, seed=9)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        return self.last(self.layers[3:](x))  # type: ignore[no-any-return]


def nested(kind: Any, rank: int) -> Any:
    return train(wrapped(kind, Nested(), **LAYER_BUCKETS), rank)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        whole_buckets,
        parts_of_buckets,
        one_bucket,
        accumulated,
        gradients_stay,
        gradients_are_never_zeroed,
        views,
        large_layers,
        nearly_all_dropped,
        shared_weights,
        nested,
    )
}


def compared(rank: int, world_size: int) -> dict[str, str]:
    return verdicts(CASES, rank)


@pytest.fixture(scope="module")
def verdicts_of_two() -> list[dict[str, str]]:
    return run_ranks(compared, 2)


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_torch_that_finds_unused_parameters(
    verdicts_of_two: list[dict[str, str]], case: str
) -> None:
    assert {verdict[case] for verdict in verdicts_of_two} == {"equal"}


class Counting(AllReduce):
    """Counts the all-reduces of buckets."""

    launches = 0

    def launch(self, bucket: Bucket, last: bool) -> Any:
        self.launches += 1
        return super().launch(bucket, last)


def launches(rank: int, world_size: int) -> list[tuple[int, int]]:
    """By step, all-reduces of buckets, and kept layers. Each layer has a bucket, and no map of used parameters is
    reduced."""
    ddp = DistributedDataParallel(Stack(), **LAYER_BUCKETS, comm=Counting)
    counts = []
    for step in range(STEPS):
        before = ddp.reducer.core.comm.launches
        ddp(batch(rank, step)).sum().backward()
        kept = len(list(ddp.module.layers))
        counts.append((ddp.reducer.core.comm.launches - before, kept))
    assert not ddp.reducer._get_local_used_map().any()
    return counts


def test_no_bucket_of_a_dropped_layer_is_reduced() -> None:
    counts, of_rank_1 = run_ranks(launches, 2)
    assert counts == of_rank_1
    assert counts[0][1] == 5
    assert all(launched == kept + 2 for launched, kept in counts[1:]), counts
    assert len({kept for _, kept in counts}) > 2


def layouts(rank: int, world_size: int) -> list[list[str]]:
    ddp = DistributedDataParallel(Wide(), bucket_cap_mb=25)
    for step in range(2):
        ddp(batch(rank, step)).sum().backward()
    names = ddp.reducer.names
    return [[names[member] for member in bucket.members] for bucket in ddp.reducer.core.buckets]


def test_large_layers_get_buckets_of_their_own() -> None:
    assert run_ranks(layouts, 2)[0] == [
        *([f"layers.{layer}.bias", f"layers.{layer}.weight"] for layer in (3, 2, 1, 0)),
        ["last.bias", "last.weight", "first.bias", "first.weight"],
    ]


class Checkpointed(Stack):
    """Each layer, or all of them together, are computed anew in backward."""

    def __init__(self, reentrant: bool, together: bool) -> None:
        super().__init__()
        self.reentrant, self.together = reentrant, together

    def forward(self, x: torch.Tensor, also: int | None = None) -> torch.Tensor:
        x = self.first(x)
        for layer in [self.layers] if self.together else self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)  # type: ignore[no-any-return]


def difference(ddp: Any, plain: Any, rank: int, world_size: int, fails: list[bool] | None = None) -> float:
    """The largest difference from a training without DDP; a step in which rank 1 fails is dropped."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ddp, plain)]
    for step in range(STEPS):
        optimizers[0].zero_grad()
        if fails is not None:
            fails[0] = rank == 1 and step in {0, 3, 4}
        with suppress(StopError, ReducerError):
            ddp(batch(rank, step)).pow(2).mean().backward()
            optimizers[0].step()
        if fails is not None and step in {0, 3, 4}:
            continue
        optimizers[1].zero_grad()
        draw(plain, step)
        for data_rank in range(world_size):
            (plain(batch(data_rank, step)).pow(2).mean() / world_size).backward()
        optimizers[1].step()
    pairs = zip(ddp.parameters(), plain.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def differences(rank: int, world_size: int) -> dict[str, float]:
    results = {}
    for reentrant in (False, True):
        for together in (False, True):
            models = [Checkpointed(reentrant, together) for _ in range(2)]
            ddp = DistributedDataParallel(models[0], **LAYER_BUCKETS)
            results[f"checkpoints, {reentrant=}, {together=}"] = difference(ddp, models[1], rank, world_size)
    for layer in ("first", "last"):  # After the launch of other buckets, and before.
        fails, ddp = [False], DistributedDataParallel(Stack(), **LAYER_BUCKETS)
        getattr(ddp.module, layer).weight.register_hook(lambda _, fails=fails: stop(fails))
        results[f"interrupted at {layer}"] = difference(ddp, Stack(), rank, world_size, fails)
    hooked = DistributedDataParallel(Stack(), **LAYER_BUCKETS)
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    results["hook"] = difference(hooked, Stack(), rank, world_size)
    finding = DistributedDataParallel(Stack(), find_unused_parameters=True, **LAYER_BUCKETS)
    results["find_unused_parameters"] = difference(finding, Stack(), rank, world_size)
    late = DistributedDataParallel(late_stack(), **LAYER_BUCKETS)
    late.module.layers[1].requires_grad_(True)
    results["unfrozen after wrapping"] = difference(late, Stack(), rank, world_size)
    return results


def late_stack() -> Stack:
    stack = Stack()
    stack.layers[1].requires_grad_(False)
    return stack


def stop(fails: list[bool]) -> None:
    if fails[0]:
        raise StopError


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_equal_those_without_ddp(ranks: int) -> None:
    for by_case in run_ranks(differences, ranks):
        assert max(by_case.values()) < 1e-6, by_case


def uneven(rank: int, world_size: int) -> list[Any]:
    """Train with more batches on the last rank, then with as many on all."""
    ddp = DistributedDataParallel(Stack(), **LAYER_BUCKETS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    results = []
    for batches in (3 + 2 * rank, 4):
        with ddp.join():
            for step in range(batches):
                optimizer.zero_grad()
                ddp(batch(rank, step)).pow(2).mean().backward()
                optimizer.step()
        results.append([parameter.tolist() for parameter in ddp.parameters()])
    return results


def test_ranks_without_data_drop_the_same_layers() -> None:
    first, second = run_ranks(uneven, 2)
    assert first == second


class WithUnused(Stack):
    """A layer besides is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(8, 8)


def recorded(rank: int, world_size: int) -> list[tuple[int, list[Any], list[str]]]:
    """Spans of buckets, names of unused parameters, and events: of dropped layers, and beside an unused layer."""
    results = []
    for module in (Stack(), WithUnused()):
        finds = isinstance(module, WithUnused)
        with sending() as sent:
            ddp = DistributedDataParallel(module, **LAYER_BUCKETS, find_unused_parameters=finds, telemetry=sent.config)
            for step in range(STEPS):
                ddp(batch(rank, step)).sum().backward()
            del ddp
        unused = sorted({name for record in sent.unused for name in [*record.locally, *record.globally]})
        results.append((len(sent.spans("bucket")), unused, sent.events))
    return results


def test_telemetry_has_no_span_of_a_dropped_layer_and_calls_no_parameter_of_it_unused() -> None:
    (spans, unused, events), (_, unused_beside, _) = run_ranks(recorded, 2)[0]
    layers = Stack().layers
    kept = sum(len(layers) - len(layers.dropped_in(step)) for step in range(1, STEPS))
    assert spans == 8 + kept + 2 * (STEPS - 1)  # The first step's buckets are not yet in the order of gradients.
    assert unused == []
    assert "layers_dropped" in events
    assert unused_beside == ["never.bias", "never.weight"]


def refused(rank: int, world_size: int) -> list[str]:
    messages = []
    for options in ({"static_graph": True}, {"bucket_cap_mb": "auto"}):
        with pytest.raises(ConfigError) as error:
            DistributedDataParallel(Stack(), **options)
        messages.append(str(error.value))
    return messages


def test_settings_that_expect_equal_steps_are_refused() -> None:
    assert run_ranks(refused, 1)[0] == [
        "static_graph: expected False with a LayerDrop, whose steps differ, got True",
        "bucket_cap_mb: expected a number of MB or None with a LayerDrop, whose steps differ, got 'auto'",
    ]


def test_an_evaluation_and_a_copy_have_every_layer() -> None:
    stack = Stack(probability=0.9)
    stack.layers.draw(1)
    assert len(list(stack.layers)) < 5
    assert len(list(copy.deepcopy(stack).layers)) == 5
    assert len(list(stack.eval().layers)) == 5
    assert list(stack.state_dict()) == list(copy.deepcopy(stack).state_dict())
    assert "layers.4.bias" in stack.state_dict()


def test_a_layer_without_layers_is_kept() -> None:
    assert len(list(LayerDrop([nn.Sequential(), nn.Tanh()], 0.0))) == 2


@pytest.mark.parametrize("probability", [-0.1, 1.0, float("nan")])
def test_a_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(ConfigError, match="probability: expected 0 to below 1"):
        LayerDrop([], probability)


def test_the_layers_are_dropped_with_the_probability() -> None:
    layers = LayerDrop((nn.Tanh() for _ in range(10)), 0.2)
    dropped = [len(layers.dropped_in(step)) for step in range(1, 1001)]
    assert sum(dropped) == pytest.approx(2000, rel=0.1)
    assert layers.dropped_in(7) == layers.dropped_in(7)
