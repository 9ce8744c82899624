"""Fingerprints of real ranks: every flipped bit is named, and replicas that are alike raise no alarm."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from ddpobs_server.analysis.findings.replicas_differ import replicas_differ
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
import ddpobs.horovod as hvd
from ddpobs import DistributedDataParallel, wire
from tests.support.analysis.failures import evidence
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.random_trainings import SEEDS, Training
from tests.support.distributed.sent import Sent, sending

TRIALS, RANKS = 65, 3
PLACES = ("gradients", "parameters", "buffers", "state", "nothing")


@dataclass(frozen=True)
class Flip:
    """A bit that flips on one rank in the second step.

    Attributes:
        place: Kind of tensor.
        rank: The rank.
        index: Draws the tensor.
        element: Draws its element.
        bit: Of the element.
    """

    place: str
    rank: int
    index: int
    element: int
    bit: int

    def apply(self, tensor: torch.Tensor, rank: int) -> None:
        if rank == self.rank:
            # Not `view(-1)`: a gradient may be a part of a bucket.
            with torch.no_grad():
                value = tensor.detach().flatten()[self.element % tensor.numel()].clone().view(1)
                value.view(torch.int32)[0] ^= 1 << self.bit if self.bit < 31 else -(2**31)
                tensor.detach().view(-1)[self.element % tensor.numel()] = value[0]


def flips(seed: int) -> Iterator[Flip]:
    draw = random.Random(seed)
    for trial in range(TRIALS):
        place = PLACES[trial % len(PLACES)]
        # A low bit of an optimizer's state may be lost when the step is rounded.
        bit = draw.randrange(22, 31) if place == "state" else draw.randrange(32)
        yield Flip(place, draw.randrange(RANKS), draw.randrange(1000), draw.randrange(1000), bit)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(9.0) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)) + self.table)  # type: ignore[no-any-return]


def flip_once(kind: str, config: Any, flip: Flip, rank: int) -> str:
    """Train three steps with one flip, and return the name of the tensor that differs first."""
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    if flip.place == "state":  # Before a batch norm the gradient of a bias is rounding noise.
        names.remove("body.bias")
    name = buffers[flip.index % len(buffers)] if flip.place == "buffers" else names[flip.index % len(names)]
    step = 0

    def flipping_hook(_, bucket):  # type: ignore[no-untyped-def]
        def flip_gradient(future: Any) -> torch.Tensor:
            if flip.place == "gradients" and step == 1:
                for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    if parameter is dict(model.named_parameters())[name]:
                        flip.apply(gradient, rank)
            return future.value()[0]  # type: ignore[no-any-return]

        return default_hooks.allreduce_hook(ddp.process_group, bucket).then(flip_gradient)

    ddp: Any = DistributedDataParallel(model, telemetry=config) if kind == "ours" else TorchDDP(model)
    if kind == "torch":
        ddpobs.attach(ddp, config)
    ddp.register_comm_hook(None, flipping_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        with corrupted_broadcast(flip if step == 2 and flip.place == "buffers" else None, name, rank):
            output = ddp(torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank)))
        optimizer.zero_grad()
        output.pow(2).mean().backward()
        if flip.place == "state" and step == 1:
            flip.apply(optimizer.state[dict(model.named_parameters())[name]]["momentum_buffer"], rank)
        optimizer.step()
        if flip.place == "parameters" and step == 1:
            flip.apply(dict(model.named_parameters())[name], rank)
    ddp(torch.ones(5, 6))
    return "" if flip.place == "nothing" else name


@contextmanager
def corrupted_broadcast(flip: Flip | None, name: str, rank: int) -> Iterator[None]:
    """Flip a bit of a buffer as soon as it was broadcast."""
    original: Any = TorchDDP._sync_module_buffers

    def sync(ddp: Any, *args: Any) -> None:
        original(ddp, *args)
        flip.apply(dict(ddp.module.named_buffers())[name], rank)  # type: ignore[union-attr]

    with mock.patch.object(TorchDDP, "_sync_module_buffers", sync if flip is not None else original):
        yield


def flip_many(rank: int, world_size: int, kind: str, seed: int) -> tuple[list[str], list[wire.Fingerprint]]:
    torch.manual_seed(seed)
    with sending() as sent:
        config = replace(sent.config, fingerprint_every=1)
        keeper = DistributedDataParallel(nn.Linear(2, 2), telemetry=config)
        names = [flip_once(kind, config, flip, rank) for flip in flips(seed)]
        # The last module of a process would end its telemetry.
        del keeper
    return names, fingerprints_of(sent)


def fingerprints_of(sent: Sent) -> list[wire.Fingerprint]:
    return [fingerprint for batch in sent.batches for fingerprint in batch.fingerprints]


def findings_by_module(by_rank: Sequence[Sequence[wire.Fingerprint]]) -> dict[int, Any]:
    samples = [(rank, sample) for rank, samples in enumerate(by_rank) for sample in samples]
    findings: list[Any] = list(replicas_differ(evidence(fingerprints=samples)))
    return {finding.evidence.module: finding for finding in findings}


@pytest.mark.parametrize(("kind", "seed"), [("ours", 1), ("torch", 2)])
def test_every_flipped_bit_is_named_with_its_rank_and_place(kind: str, seed: int) -> None:
    results = run_ranks(flip_many, RANKS, kind, seed)
    findings = findings_by_module([samples for _, samples in results])
    for module, (flip, name) in enumerate(zip(flips(seed), results[0][0], strict=True), 1):
        finding = findings.pop(module, None)
        if flip.place == "nothing":
            assert finding is None
            continue
        assert finding is not None, flip
        assert (finding.ranks, finding.parameters) == ([flip.rank], [name]), (flip, finding)
        parts = {"state": "parameters"}.get(flip.place, flip.place)
        assert getattr(finding.evidence, f"differing_{parts}") == [name], (flip, finding)
        if flip.place != "gradients":
            assert "gradients" not in finding.evidence.parts
    assert findings == {}


# ------------------------------------------------------------------ replicas that are alike


def train_randomly(rank: int, world_size: int, kind: str) -> list[wire.Fingerprint]:
    warnings.simplefilter("ignore")
    with sending() as sent:
        config = replace(sent.config, fingerprint_every=1)

        def wrap(model: nn.Module, **options: Any) -> Any:
            if kind == "ours":
                return DistributedDataParallel(model, telemetry=config, **options)
            ddp = TorchDDP(model, **options)
            ddpobs.attach(ddp, config)
            return ddp

        keeper = wrap(nn.Linear(2, 2))
        for seed in SEEDS:
            Training(seed, rank, wrap).results()
        del keeper
    return fingerprints_of(sent)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.wide), 3])
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_random_trainings_raise_no_alarm(kind: str, world_size: int) -> None:
    by_rank = run_ranks(train_randomly, world_size, kind)
    assert all(len(samples) > len(SEEDS) for samples in by_rank)
    assert findings_by_module(by_rank) == {}


def train_unusually(rank: int, world_size: int) -> list[wire.Fingerprint]:
    """Uneven inputs, an error that is caught, buffers and parameters that may differ, a local evaluation."""
    with sending() as sent:
        config = replace(sent.config, fingerprint_every=1)
        model = Net()
        ddp = DistributedDataParallel(model, telemetry=config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ddp.join():
            for step in range(3 + 2 * rank):
                step_once(ddp, optimizer, rank, step)
        for step in range(4):
            if step == 1:
                output = ddp(inputs(rank, step))
                if rank == 0:
                    output.register_hook(fail)
                loss = output.pow(2).mean()
                with pytest.raises(RuntimeError, match="own error" if rank == 0 else "interrupted"):
                    loss.backward()
            else:
                step_once(ddp, optimizer, rank, step)
        if rank == 0:  # Averaged weights, on one rank alone.
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.body.weight.data.mul_(0.5)
            with torch.no_grad():
                model(inputs(rank, 9))
            model.load_state_dict(saved)
        step_once(ddp, optimizer, rank, 10)
        other = Net()
        other.register_buffer("place", torch.tensor(float(rank)))
        local = DistributedDataParallel(other, telemetry=config, broadcast_buffers=False)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(3):
            step_once(local, second, rank, step)
        ignoring = Net()
        ignoring._ddp_params_and_buffers_to_ignore = ["head.bias"]  # type: ignore[assignment]
        third = torch.optim.SGD(ignoring.parameters(), lr=0.1)
        partial = DistributedDataParallel(ignoring, telemetry=config)
        for step in range(3):
            step_once(partial, third, rank, step)
        hooked = DistributedDataParallel(Net(), telemetry=config)
        subgroup = torch.distributed.new_subgroups(1)[0]
        state = post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=0)
        hooked.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        fourth = torch.optim.SGD(hooked.parameters(), lr=0.1)
        for step in range(3):
            step_once(hooked, fourth, rank, step)
    return fingerprints_of(sent)


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("own error")


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def step_once(ddp: Any, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    ddp(inputs(rank, step)).pow(2).mean().backward()
    optimizer.step()


def test_replicas_that_differ_on_purpose_raise_no_alarm() -> None:
    by_rank = run_ranks(train_unusually, 2)
    assert findings_by_module(by_rank) == {}
    assert {sample.module for sample in by_rank[0]} == {0, 1, 2}
    assert "place" not in {name for samples in by_rank for sample in samples for name in sample.buffer_names}
    assert "head.bias" not in {n for samples in by_rank for s in samples if s.module == 2 for n in s.names}


def train_with_horovod(rank: int, world_size: int, tampers: bool) -> list[wire.Fingerprint]:
    hvd.init()
    with sending() as sent:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            telemetry=replace(sent.config, fingerprint_every=1),
        )
        for step in range(4):
            optimizer.zero_grad()
            model(inputs(rank, step)).pow(2).mean().backward()
            optimizer.step()
            if tampers and step == 2 and rank == 1:
                model.get_parameter("1.bias").data[1] += 1e-3
    return fingerprints_of(sent)


def test_replicas_of_horovods_optimizer_are_compared() -> None:
    alike = run_ranks(train_with_horovod, 2, False)
    assert [sample.synchronised for sample in alike[0]] == [0, 1, 2]
    assert findings_by_module(alike) == {}
    finding = findings_by_module(run_ranks(train_with_horovod, 2, True))[0]
    assert (finding.parameters, finding.evidence.parts, finding.steps[1]) == (["1.bias"], ["parameters"], 2)


def train_in_groups(rank: int, world_size: int) -> int:
    """Two groups hold different models, as with tensor parallelism."""
    groups = [torch.distributed.new_group([first, first + 1]) for first in (0, 2)]
    torch.manual_seed(rank // 2)
    with sending() as sent:
        ddp = DistributedDataParallel(
            Net(), telemetry=replace(sent.config, fingerprint_every=1), process_group=groups[rank // 2]
        )
        for step in range(3):
            step_once(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank, step)
    return len(fingerprints_of(sent))


def test_ranks_of_separate_groups_are_not_compared() -> None:
    assert run_ranks(train_in_groups, 4) == [0] * 4
