"""What is done with a full bucket, on real gloo ranks: each way against the plain all-reduce, and in training."""

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

from ddpobs import DistributedDataParallel
from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import FuturePending, PowerSGD, TopK
from ddpobs.comm.int8 import BLOCK, decode, encode
from ddpobs.errors import ConfigError, ReducerError, UnusedParametersError
from tests.distributed.compare import batch, net, train
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending

CAP = {"bucket_cap_mb": 0.05}
WAYS = ["all_reduce", "fp16", "bf16", "int8", "topk:0.1", "powersgd:2", "parameter_server"]
CLOSE = {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2, "parameter_server": 1e-6}
"""How far a step's gradients may be from the plain mean, as a share of the largest."""


def gradients(ddp: nn.Module, rank: int) -> list[torch.Tensor]:
    ddp(batch(rank)).pow(2).mean().backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    largest = max(float(t.abs().max()) for t in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / largest


def same_everywhere(tensors: list[torch.Tensor]) -> bool:
    flat = torch.cat([tensor.flatten().double() for tensor in tensors])
    first = flat.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, flat)


def one_step_and_more(rank: int, world_size: int) -> dict[str, Any]:
    plain = gradients(DistributedDataParallel(net(), **CAP), rank)
    trained = train(DistributedDataParallel(net(), **CAP), rank)
    found: dict[str, Any] = {
        f"{way}, distance": distance(gradients(DistributedDataParallel(net(), comm=way, **CAP), rank), plain)
        for way in CLOSE
    }
    torchs = TorchDDP(net(), **CAP)
    torchs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    # Torch's first backward has one bucket, so four ranks add up in another order; two cannot, but for subnormals.
    ours = gradients(DistributedDataParallel(net(), comm="fp16", **CAP), rank)
    apart = distance(ours, gradients(torchs, rank))
    found["fp16, as torch's hook"] = apart < (1e-4 if world_size == 2 else 1e-3)
    for groups in (2, 3):
        ddp = DistributedDataParallel(net(), round_robin_groups=groups, **CAP)
        found[f"round robin {groups}, as plain"] = all(map(torch.equal, train(ddp, rank), trained))
    for way in WAYS:
        trained_so = train(
            DistributedDataParallel(net(), comm=way, round_robin_groups=2, **CAP),
            rank,
            steps=4 if world_size > 2 else 12,
        )
        found[f"{way}, same on all ranks"] = same_everywhere(trained_so)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_way_gives_its_mean_to_every_rank(world_size: int) -> None:
    for found in run_ranks(one_step_and_more, world_size):
        for way, limit in CLOSE.items():
            assert found.pop(f"{way}, distance") < limit, way
        assert found == dict.fromkeys(found, True)


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
                    p.sub_(p.grad, alpha=0.05)
    return [p.detach().clone() for p in ddp.parameters()]


def circumstances(rank: int, world_size: int) -> dict[str, Any]:
    """Each way under what a training may ask for besides."""
    found: dict[str, Any] = {}
    dtypes = mixed(DistributedDataParallel(Mixed()), rank)
    uneven = joined(None, rank)
    for way in WAYS:
        found[f"{way}: sparse and other dtypes"] = (
            distance(mixed(DistributedDataParallel(Mixed(), comm=way), rank), dtypes) < CLOSE.get(way, 1.0)
            or way == "topk:0.1"
        )
        found[f"{way}: join"] = same_everywhere(ended := joined(way, rank)) and (
            way not in CLOSE or distance(ended, uneven) < CLOSE[way]
        )
        found[f"{way}: a missing gradient is told everywhere"] = left_out(way, rank)
        ddp = DistributedDataParallel(net(), comm=way, round_robin_groups=2, **CAP)
        first = gradients(copy.deepcopy(ddp), rank)
        found[f"{way}: copied and pickled"] = all(
            map(torch.equal, gradients(pickle.loads(pickle.dumps(ddp)), rank), first)
        )
        ddp._update_process_group(dist.new_group())
        found[f"{way}: group replaced"] = all(map(torch.equal, gradients(ddp, rank), first))
    return found


class Odd(nn.Module):
    """Parameters that are no matrix: a single number, two that are empty, one in a bucket alone, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale, self.empty = net(), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 3))
        self.turn, self.alone = nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(0).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) * self.scale * self.turn).abs() + self.empty.sum() + self.alone.sum()  # type: ignore[no-any-return]


def odd(rank: int, world_size: int) -> dict[str, Any]:
    """As many steps as PowerSGD needs to begin."""
    trained = {way: oddly(way, rank) for way in WAYS}
    return {way: same_everywhere(to) and distance(to, trained["all_reduce"]) < 0.1 for way, to in trained.items()}


def oddly(way: str, rank: int) -> list[torch.Tensor]:
    found = train(DistributedDataParallel(Odd(), comm=way, **CAP), rank, steps=12)
    return [torch.view_as_real(t) if t.is_complex() else t for t in found if t.numel()]


def test_each_way_takes_single_numbers_empty_parameters_and_complex_ones() -> None:
    assert run_ranks(odd, 2) == [dict.fromkeys(WAYS, True)] * 2


def left_out(way: str, rank: int) -> bool:
    """Rank 0 leaves one parameter out."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.maybe = net(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            return self.maybe(h) if rank else h

    ddp = DistributedDataParallel(Skips(), comm=way, **CAP)
    try:
        ddp(batch(rank)).pow(2).mean().backward()
    except UnusedParametersError as error:
        return error.parameters == {"maybe.weight": [0], "maybe.bias": [0]}
    return False


def test_each_way_holds_with_sparse_gradients_join_faults_copies_and_other_groups() -> None:
    for found in run_ranks(circumstances, 2):
        assert found == dict.fromkeys(found, True)


def digits_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


def on_digits(rank: int, world_size: int) -> dict[str, float]:
    """Loss on held-out digits after the same training, by way."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[shuffled] / 16, torch.tensor(labels)[shuffled]
    losses = {}
    for way in [*WAYS, partial(PowerSGD, rank=4, start_iteration=20), partial(TopK, density=0.05)]:
        ddp = DistributedDataParallel(digits_net(), comm=way, bucket_cap_mb=0.03)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        order = torch.Generator().manual_seed(1)
        for _ in range(120):
            chosen = torch.randint(0, 1500, (world_size, 32), generator=order)[rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x[chosen]), y[chosen]).backward()
            optimizer.step()
        with torch.no_grad():
            losses[str(way)] = float(nn.functional.cross_entropy(ddp.module(x[1500:]), y[1500:]))
    return losses


def test_a_real_training_comes_to_the_same_loss_by_every_way() -> None:
    losses = run_ranks(on_digits, 2)[0]
    untrained, plain = math.log(10), losses.pop("all_reduce")
    assert plain < 0.15 * untrained
    assert {way: loss for way, loss in losses.items() if loss > plain + 0.05 * untrained} == {}


def names_sent(rank: int, world_size: int) -> list[str]:
    names = []
    ways = ("fp16", "bf16", "int8", "topk", "powersgd", "parameter_server")
    for comm, groups in ((None, 1), *((way, 1) for way in ways), (None, 3), ("int8", 2)):
        with sending() as sent:
            ddp = DistributedDataParallel(net(), comm=comm, round_robin_groups=groups, telemetry=sent.config)
            train(ddp, rank)
        names.append(sent.layouts[-1].comm)
    return names


def test_telemetry_names_the_way() -> None:
    plain = ["all_reduce", "fp16", "bf16", "int8", "topk:0.01", "powersgd:1", "parameter_server"]
    assert run_ranks(names_sent, 2)[0] == [*plain, "round_robin:3", "round_robin:2:int8"]


def wrong_arguments(rank: int, world_size: int) -> list[str]:
    said = []
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
            said.append(f"{error.setting} {error.came}")
    ddp = DistributedDataParallel(net(), comm="fp16")
    with pytest.raises(ReducerError, match="comm='fp16'"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return said


def test_what_is_no_way_is_a_clear_error() -> None:
    (said,) = run_ranks(wrong_arguments, 1)
    bad = ["fp15", "topk:0", "topk:many", "fp16:2", "powersgd:0", "16"]
    assert said == [*(f"comm {value}" for value in bad), "round_robin_groups 0"]


def test_blocks_of_eight_bits_are_off_by_at_most_half_a_scale() -> None:
    values = torch.randn(3, 4 * BLOCK, generator=torch.Generator().manual_seed(0))
    values[0, :BLOCK] = 0
    values[1, 5] = 1000
    scales = values.view(3, 4, BLOCK).abs().amax(2, keepdim=True) / 127
    off = (decode(encode(values)) - values).view(3, 4, BLOCK).abs()
    assert bool((off <= scales * 0.501).all())
    assert encode(values).numel() == values.numel() * (1 + 4 / BLOCK)


def what_topk_owes(rank: int, world_size: int) -> list[bool]:
    """After each step: what was sent so far and what is still owed is all that ever came, across a rebuild too."""
    ddp = DistributedDataParallel(net(), comm=partial(TopK, density=0.05), bucket_cap_mb=0.05)
    total = [torch.zeros_like(p) for p in ddp.parameters()]
    sent = [torch.zeros_like(p) for p in ddp.parameters()]
    held = []
    for step in range(4):
        local = net()
        local(batch(rank, step)).pow(2).mean().backward()
        ddp.zero_grad()
        ddp(batch(rank, step)).pow(2).mean().backward()
        for index, (mine, p) in enumerate(zip(local.parameters(), ddp.parameters(), strict=True)):
            total[index] += mine.grad / world_size
            sent[index] += p.grad
        owed = [torch.zeros_like(p) for p in ddp.parameters()]
        for bucket in ddp.reducer.core.buckets:
            for member, part in zip(bucket.members, bucket.parts_of(bucket.residual), strict=True):
                owed[member] += part
        for tensors in (total_now := [t.clone() for t in total], owed):
            for tensor in tensors:
                dist.all_reduce(tensor)
        held.append(
            all(torch.allclose(a, b + c, atol=1e-6) for a, b, c in zip(total_now, sent, owed, strict=True))
            and ddp.reducer.rebuilt == (step > 0)
        )
    return held


def test_topk_loses_nothing_it_only_owes_it() -> None:
    assert run_ranks(what_topk_owes, 2)[0] == [True] * 4


class Sometimes(nn.Module):
    """A layer that some steps leave out on every rank, in a bucket with another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        return self.always(x) + 100 * self.sometimes(x) if uses else self.always(x)  # type: ignore[no-any-return]


def what_topk_owes_to_the_unused(rank: int, world_size: int) -> float:
    """How far what was given, and what is owed, of a layer's bias is from all that came, as a share of that."""
    ddp = DistributedDataParallel(Sometimes(), comm=partial(TopK, density=0.05), find_unused_parameters=True)
    bias = ddp.module.sometimes.bias
    given, came = torch.zeros(8), torch.zeros(8)
    for step in range(6):
        ddp.zero_grad()
        ddp(batch(rank, step), step < 2).sum().backward()
        came += 400.0 * (step < 2)
        given += 0 if bias.grad is None else bias.grad
    bucket = ddp.reducer.core.layout.bucket_of[3]
    owed = bucket.parts_of(bucket.residual)[ddp.reducer.core.layout.index_in_bucket[3]].clone()
    dist.all_reduce(owed)
    return float((given + owed - came).abs().max() / came.max())


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_topk_owes_on_what_nobody_used_meanwhile() -> None:
    assert max(run_ranks(what_topk_owes_to_the_unused, 2)) < 1e-4


class Rank0Alone:
    """A user's own way, by the interface alone: everyone takes rank 0's gradients."""

    name, divides, carries_nan = "rank_0_alone", False, False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def launch(self, bucket: Bucket, last: bool) -> FuturePending:
        return FuturePending(dist.broadcast(bucket.buffer, 0, self._group, async_op=True).get_future())


def own_way(rank: int, world_size: int) -> bool:
    local = net()
    local(batch(0)).pow(2).mean().backward()
    ours = gradients(DistributedDataParallel(net(), comm=Rank0Alone, **CAP), rank)
    return all(torch.equal(p.grad, gradient) for p, gradient in zip(local.parameters(), ours, strict=True))


def test_a_user_may_bring_a_way_of_their_own() -> None:
    assert run_ranks(own_way, 2) == [True, True]
