"""Communication strategies on real gloo ranks: each against the plain all-reduce, and in training."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.parameter_server import ParameterServer, Servers
from ddpobs import DistributedDataParallel
from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import FuturePending, PowerSGD, TopK, registry
from ddpobs.comm.strategies.int8 import BLOCK, decode, encode
from ddpobs.errors import ConfigError, ReducerError, UnusedParametersError
from tests.support.distributed.compare import CAP, batch, grad, net, train
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.strategies import STRATEGIES, same_everywhere

SERVERS = partial(Servers, on_each_rank=True)
CLOSE: dict[Any, float] = {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2, ParameterServer: 1e-6, SERVERS: 1e-6}
"""Largest distance of a step's gradients from the plain mean, as a share of the largest gradient."""


def gradients(ddp: nn.Module, rank: int) -> list[torch.Tensor]:
    ddp(batch(rank)).pow(2).mean().backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    largest = max(float(t.abs().max()) for t in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / largest


def one_step_and_more(rank: int, world_size: int) -> dict[str, Any]:
    plain = gradients(DistributedDataParallel(net(), **CAP), rank)
    trained = train(DistributedDataParallel(net(), **CAP), rank)
    results: dict[str, Any] = {
        f"{strategy}, distance": distance(gradients(DistributedDataParallel(net(), comm=strategy, **CAP), rank), plain)
        for strategy in CLOSE
    }
    torchs = TorchDDP(net(), **CAP)
    torchs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    # Torch's first backward has one bucket, so four ranks add up in another order. Two ranks cannot, except for
    # subnormals.
    ours = gradients(DistributedDataParallel(net(), comm="fp16", **CAP), rank)
    difference = distance(ours, gradients(torchs, rank))
    results["fp16, as torch's hook"] = difference < (1e-4 if world_size == 2 else 1e-3)
    for groups in (2, 3):
        ddp = DistributedDataParallel(net(), round_robin_groups=groups, **CAP)
        results[f"round robin {groups}, as plain"] = all(map(torch.equal, train(ddp, rank), trained))
    for strategy in STRATEGIES:
        trained_parameters = train(
            DistributedDataParallel(net(), comm=strategy, round_robin_groups=2, **CAP),
            rank,
            steps=4 if world_size > 2 else 12,
        )
        results[f"{strategy}, same on all ranks"] = same_everywhere(trained_parameters)
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_strategy_gives_the_same_mean_to_every_rank(world_size: int) -> None:
    for results in run_ranks(one_step_and_more, world_size):
        for strategy, limit in CLOSE.items():
            assert results.pop(f"{strategy}, distance") < limit, strategy
        assert results == dict.fromkeys(results, True)


class Mixed(nn.Module):
    """A sparse gradient, a half and a double one, in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(10, 8, sparse=True)
        self.narrow, self.wide = nn.Linear(8, 8).to(torch.bfloat16), nn.Linear(8, 600).to(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(self.words(x).to(torch.bfloat16)).to(torch.float64))  # type: ignore[no-any-return]


def mixed(ddp: nn.Module, rank: int) -> list[torch.Tensor]:
    ddp(torch.tensor([rank, 5])).pow(2).mean().backward()
    return [p.grad.to_dense().double() for p in ddp.parameters() if p.grad is not None]


def joined(comm: str | None, rank: int) -> list[torch.Tensor]:
    ddp = DistributedDataParallel(net(), comm=comm, **CAP)
    with ddp.join():
        for step in range(3 + 2 * rank):
            ddp.zero_grad()
            ddp(batch(rank, step)).pow(2).mean().backward()
            with torch.no_grad():
                for p in ddp.parameters():
                    p.sub_(grad(p), alpha=0.05)
    return [p.detach().clone() for p in ddp.parameters()]


def circumstances(rank: int, world_size: int) -> dict[str, Any]:
    """Each strategy combined with other features of training."""
    results: dict[str, Any] = {}
    dtypes = mixed(DistributedDataParallel(Mixed()), rank)
    uneven = joined(None, rank)
    for strategy in STRATEGIES:
        results[f"{strategy}: sparse and other dtypes"] = (
            distance(mixed(DistributedDataParallel(Mixed(), comm=strategy), rank), dtypes) < CLOSE.get(strategy, 1.0)
            or strategy == "topk:0.1"
        )
        results[f"{strategy}: join"] = same_everywhere(ended := joined(strategy, rank)) and (
            strategy not in CLOSE or distance(ended, uneven) < CLOSE[strategy]
        )
        results[f"{strategy}: a missing gradient raises on every rank"] = left_out(strategy, rank)
        ddp = DistributedDataParallel(net(), comm=strategy, round_robin_groups=2, **CAP)
        first = gradients(copy.deepcopy(ddp), rank)
        results[f"{strategy}: copied and pickled"] = all(
            map(torch.equal, gradients(pickle.loads(pickle.dumps(ddp)), rank), first)
        )
        ddp._update_process_group(dist.new_group())  # type: ignore[no-untyped-call]
        results[f"{strategy}: group replaced"] = all(map(torch.equal, gradients(ddp, rank), first))
    return results


class Odd(nn.Module):
    """Parameters that are not matrices: a scalar, two empty ones (one alone in its bucket), and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale, self.empty = net(), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 3))
        self.turn, self.alone = nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(0).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) * self.scale * self.turn).abs() + self.empty.sum() + self.alone.sum()  # type: ignore[no-any-return]


def odd(rank: int, world_size: int) -> dict[str, Any]:
    """Train for enough steps for PowerSGD to begin."""
    trained = {strategy: oddly(strategy, rank) for strategy in STRATEGIES}
    return {
        strategy: same_everywhere(to) and distance(to, trained["all_reduce"]) < 0.1 for strategy, to in trained.items()
    }


def oddly(strategy: str, rank: int) -> list[torch.Tensor]:
    results = train(DistributedDataParallel(Odd(), comm=strategy, **CAP), rank, steps=12)
    return [torch.view_as_real(t) if t.is_complex() else t for t in results if t.numel()]


def test_each_strategy_takes_scalar_empty_and_complex_parameters() -> None:
    assert run_ranks(odd, 2) == [dict.fromkeys(STRATEGIES, True)] * 2


def left_out(strategy: str, rank: int) -> bool:
    """Rank 0 leaves one parameter out."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.maybe = net(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.body(x)
            return self.maybe(h) if rank else h

    ddp = DistributedDataParallel(Skips(), comm=strategy, **CAP)
    try:
        ddp(batch(rank)).pow(2).mean().backward()
    except UnusedParametersError as error:
        return error.parameters == {"maybe.weight": [0], "maybe.bias": [0]}
    return False


def test_each_strategy_works_with_sparse_gradients_join_faults_copies_and_other_groups() -> None:
    for results in run_ranks(circumstances, 2):
        assert results == dict.fromkeys(results, True)


def digits_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


def on_digits(rank: int, world_size: int) -> dict[str, float]:
    """Loss on held-out digits after the same training, by strategy."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[shuffled] / 16, torch.tensor(labels)[shuffled]
    losses = {}
    strategies: list[Any] = [*STRATEGIES, partial(PowerSGD, rank=4, start_iteration=20), partial(TopK, density=0.05)]
    for strategy in strategies:
        ddp = DistributedDataParallel(digits_net(), comm=strategy, bucket_cap_mb=0.03)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        order = torch.Generator().manual_seed(1)
        for _ in range(120):
            chosen = torch.randint(0, 1500, (world_size, 32), generator=order)[rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x[chosen]), y[chosen]).backward()
            optimizer.step()
        with torch.no_grad():
            losses[str(strategy)] = float(nn.functional.cross_entropy(ddp.module(x[1500:]), y[1500:]))
    return losses


def test_a_real_training_reaches_the_same_loss_with_every_strategy() -> None:
    losses = run_ranks(on_digits, 2)[0]
    untrained, plain = math.log(10), losses.pop("all_reduce")
    assert plain < 0.15 * untrained
    assert {strategy: loss for strategy, loss in losses.items() if loss > plain + 0.05 * untrained} == {}


def names_sent(rank: int, world_size: int) -> list[str]:
    names = []
    alone = [registered.name for registered in registry.STRATEGIES if registered.name != "all_reduce"]
    for comm, groups in ((None, 1), *((name, 1) for name in alone), (None, 3), ("int8", 2)):
        with sending() as records:
            ddp = DistributedDataParallel(net(), comm=comm, round_robin_groups=groups, telemetry=records.config)
            train(ddp, rank)
        names.append(records.layouts[-1].comm)
    return names


def test_telemetry_names_the_strategy_with_its_argument() -> None:
    defaults = {"topk": "topk:0.01", "powersgd": "powersgd:1"}
    expected = [defaults.get(registered.name, registered.name) for registered in registry.STRATEGIES]
    assert run_ranks(names_sent, 2)[0] == [*expected, "round_robin:3", "round_robin:2:int8"]


def wrong_arguments(rank: int, world_size: int) -> list[str]:
    refusals = []
    for arguments in (
        {"comm": "fp15"},
        {"comm": "topk:0"},
        {"comm": "topk:many"},
        {"comm": "fp16:2"},
        {"comm": "powersgd:0"},
        {"comm": 16},
        {"round_robin_groups": 0},
    ):
        try:
            DistributedDataParallel(net(), **arguments)
        except ConfigError as error:
            refusals.append(f"{error.setting} {error.actual}")
    ddp = DistributedDataParallel(net(), comm="fp16")
    with pytest.raises(ReducerError, match="comm='fp16'"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return refusals


def test_a_name_that_is_no_strategy_is_a_clear_error() -> None:
    (refusals,) = run_ranks(wrong_arguments, 1)
    bad = ["fp15", "topk:0", "topk:many", "fp16:2", "powersgd:0", "16"]
    assert refusals == [*(f"comm {value}" for value in bad), "round_robin_groups 0"]


def test_blocks_of_eight_bits_are_off_by_at_most_half_a_scale() -> None:
    values = torch.randn(3, 4 * BLOCK, generator=torch.Generator().manual_seed(0))
    values[0, :BLOCK] = 0
    values[1, 5] = 1000
    scales = values.view(3, 4, BLOCK).abs().amax(2, keepdim=True) / 127
    off = (decode(encode(values)) - values).view(3, 4, BLOCK).abs()
    assert bool((off <= scales * 0.501).all())
    assert encode(values).numel() == values.numel() * (1 + 4 / BLOCK)


def topk_residuals(rank: int, world_size: int) -> list[bool]:
    """Whether, after each step, sent gradients plus residuals equal all gradients so far, also across a rebuild."""
    ddp = DistributedDataParallel(net(), comm=partial(TopK, density=0.05), bucket_cap_mb=0.05)
    total = [torch.zeros_like(p) for p in ddp.parameters()]
    records = [torch.zeros_like(p) for p in ddp.parameters()]
    balanced = []
    for step in range(4):
        local = net()
        local(batch(rank, step)).pow(2).mean().backward()
        ddp.zero_grad()
        ddp(batch(rank, step)).pow(2).mean().backward()
        for index, (local_parameter, p) in enumerate(zip(local.parameters(), ddp.parameters(), strict=True)):
            total[index] += grad(local_parameter) / world_size
            records[index] += grad(p)
        residual = [torch.zeros_like(p) for p in ddp.parameters()]
        for bucket in ddp.reducer.core.buckets:
            for member, part in zip(bucket.members, bucket.parts_of(bucket.residual), strict=True):
                residual[member] += part
        for tensors in (total_now := [t.clone() for t in total], residual):
            for tensor in tensors:
                dist.all_reduce(tensor)
        balanced.append(
            all(torch.allclose(a, b + c, atol=1e-6) for a, b, c in zip(total_now, records, residual, strict=True))
            and ddp.reducer.rebuilt == (step > 0)
        )
    return balanced


def test_topk_keeps_every_unsent_gradient_in_its_residual() -> None:
    assert run_ranks(topk_residuals, 2)[0] == [True] * 4


class Sometimes(nn.Module):
    """A layer that some steps leave out on every rank, in a bucket with another layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        return self.always(x) + 100 * self.sometimes(x) if uses else self.always(x)  # type: ignore[no-any-return]


def topk_residual_of_an_unused_layer(rank: int, world_size: int) -> float:
    """Distance of a layer's received gradients plus residual from all its gradients, as a share of these."""
    ddp = DistributedDataParallel(Sometimes(), comm=partial(TopK, density=0.05), find_unused_parameters=True)
    bias = ddp.module.sometimes.bias
    received, produced = torch.zeros(8), torch.zeros(8)
    for step in range(6):
        ddp.zero_grad()
        ddp(batch(rank, step), step < 2).sum().backward()
        produced += 400.0 * (step < 2)
        received += 0 if bias.grad is None else bias.grad
    bucket = ddp.reducer.core.layout.bucket_of[3]
    residual = bucket.parts_of(bucket.residual)[ddp.reducer.core.layout.index_in_bucket[3]].clone()
    dist.all_reduce(residual)
    return float((received + residual - produced).abs().max() / produced.max())


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_topk_keeps_the_residual_of_a_layer_that_is_unused_for_a_while() -> None:
    assert max(run_ranks(topk_residual_of_an_unused_layer, 2)) < 1e-4


class Rank0Alone:
    """A user's strategy that uses the interface alone: every rank takes rank 0's gradients."""

    name, divides, carries_nan = "rank_0_alone", False, False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def launch(self, bucket: Bucket, last: bool) -> FuturePending:
        return FuturePending(dist.broadcast(bucket.buffer, 0, self._group, async_op=True).get_future())


def users_strategy(rank: int, world_size: int) -> bool:
    local = net()
    local(batch(0)).pow(2).mean().backward()
    ours = gradients(DistributedDataParallel(net(), comm=Rank0Alone, **CAP), rank)
    return all(torch.equal(grad(p), gradient) for p, gradient in zip(local.parameters(), ours, strict=True))


def test_a_user_may_pass_their_own_strategy() -> None:
    assert run_ranks(users_strategy, 2) == [True, True]
