"""Telemetry on torch's own DDP: the same results to the bit, and the same records as on ours."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
from ddpobs import telemetry
from ddpobs.clocks import HostClock
from ddpobs.errors import DdpobsError
from tests.support.distributed.compare import CAP, batch, net, outcome, train
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import Sent, sending

Training = Callable[[Any, int], Any]


def plain(ddp: Any, rank: int) -> Any:
    return train(ddp, rank)


def accumulating(ddp: Any, rank: int) -> Any:
    for step in range(3):
        with ddp.no_sync():
            ddp(batch(rank, step)).sum().backward()
        ddp(batch(rank, step + 9)).sum().backward()
    return outcome(ddp)


def joined(ddp: Any, rank: int) -> Any:
    with ddp.join():
        return train(ddp, rank, 2 + rank)


def replaced_group(ddp: Any, rank: int) -> Any:
    train(ddp, rank)
    ddp._update_process_group(dist.new_group())
    return train(ddp, rank)


def compiled(ddp: Any, rank: int) -> Any:
    compiled: Any = torch.compile(ddp, backend="aot_eager")
    for step in range(3):
        compiled(batch(rank, step)).sum().backward()
    return outcome(ddp)


def hook_after(ddp: Any, rank: int) -> Any:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(ddp, rank)


def power_sgd_after(ddp: Any, rank: int) -> Any:
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    return train(ddp, rank)


def builtin_after(ddp: Any, rank: int) -> Any:
    ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    return train(ddp, rank)


def copied(ddp: Any, rank: int) -> Any:
    """Train a copy, which has no telemetry."""
    twin = copy.deepcopy(ddp)
    return [train(ddp, rank), train(twin, rank)]


TRAININGS: dict[str, tuple[Training, dict[str, Any]]] = {
    "plain": (plain, CAP),
    "views": (plain, CAP | {"gradient_as_bucket_view": True}),
    "unused": (plain, CAP | {"find_unused_parameters": True}),
    "static": (plain, CAP | {"static_graph": True}),
    "no_sync": (accumulating, CAP),
    "join": (joined, CAP),
    "group replaced": (replaced_group, CAP),
    "compiled": (compiled, {}),
    "hook after": (hook_after, CAP),
    "PowerSGD after": (power_sgd_after, {}),
    "built-in after": (builtin_after, CAP),
    "copied": (copied, CAP),
}


def hooked_before(ddp: Any) -> Any:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def builtin_before(ddp: Any) -> Any:
    ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    return ddp


def summarise(records: Sent) -> dict[str, Any]:
    """Summarise the records that a diagnosis needs."""
    ordered = zip(records.spans("ready_ns"), records.spans("launched_ns"), records.spans("done_ns"), strict=True)
    return {
        "steps": len(records.steps("step")),
        "spans": len(records.spans("step")),
        "ordered": all(0 < ready <= launched <= done for ready, launched, done in ordered),
        "buckets": [[[p.name for p in b.parameters] for b in layout.buckets] for layout in records.layouts],
        "comm": records.layouts[-1].comm if records.layouts else None,
        "exposed": sum(records.steps("exposed_comm_ns")),
        "events": records.events,
        "comms": sorted(set(records.comms("kind"))),
        "unused": [(unused.locally, unused.globally) for unused in records.unused],
    }


def everything(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (training, options) in TRAININGS.items():
        theirs = training(TorchDDP(net(), **options), rank)
        with sending() as records:
            ddp = TorchDDP(net(), **options)
            ddpobs.attach(ddp, records.config)
            attached = training(ddp, rank)
        results[name] = (equal(attached, theirs), summarise(records))
        del ddp
    for name, hooked in (("hook before", hooked_before), ("built-in before", builtin_before)):
        theirs = train(hooked(TorchDDP(net(), **CAP)), rank)
        with sending() as records:
            ddp = hooked(TorchDDP(net(), **CAP))
            ddpobs.attach(ddp, records.config)
            attached = train(ddp, rank)
        results[name] = (equal(attached, theirs), summarise(records))
        del ddp
    with sending() as records:
        ddp = hooked_before(TorchDDP(net(), **CAP))
        train(ddp, rank, 2)
        ddpobs.attach(ddp, records.config)
        train(ddp, rank, 2)
    results["hook before, in training"] = (True, summarise(records))
    return results


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    return all(map(equal, ours, theirs))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.wide)])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(everything, request.param)


BEFORE = ["hook before", "built-in before"]


@pytest.mark.parametrize("name", [*TRAININGS, *BEFORE])
def test_the_result_is_the_same_to_the_bit(results: list[dict[str, Any]], name: str) -> None:
    assert all(answers[name][0] for answers in results)


@pytest.mark.parametrize(
    "name", ["plain", "views", "unused", "static", "hook after", "built-in after", "PowerSGD after", *BEFORE]
)
def test_every_bucket_of_every_step_is_recorded(results: list[dict[str, Any]], name: str) -> None:
    for answers in results:
        records = answers[name][1]
        assert records["steps"] == 4
        assert records["ordered"]
        first, last = records["buckets"][0], records["buckets"][-1]
        # Torch's first backward has other buckets; with a static graph the second one too.
        early = 2 if name == "static" else 1
        assert records["spans"] == early * len(first) + (4 - early) * len(last)
        assert sorted(parameter for bucket in last for parameter in bucket) == sorted(
            f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")
        )


def test_telemetry_names_the_strategy_or_the_hook(results: list[dict[str, Any]]) -> None:
    for answers in results:
        assert answers["plain"][1]["comm"] == "all_reduce"
        assert answers["hook after"][1]["comm"] == answers["hook before"][1]["comm"] == "fp16_compress_hook"
        assert answers["PowerSGD after"][1]["comm"] == "powerSGD_hook"


def test_micro_batches_and_joined_ranks_count_as_each_ranks_own_steps(results: list[dict[str, Any]]) -> None:
    assert [answers["no_sync"][1]["steps"] for answers in results] == [3] * len(results)
    assert [answers["join"][1]["steps"] for answers in results] == [2 + rank for rank in range(len(results))]


def test_a_hook_that_cannot_be_timed_is_reported_and_its_steps_are_kept(results: list[dict[str, Any]]) -> None:
    for answers in results:
        records = answers["hook before, in training"][1]
        assert records["events"].count("comm_hook_unseen") == 1
        assert (records["steps"], records["spans"]) == (2, 0)
        assert records["exposed"] > 0


class Mixed(nn.Module):
    """A bucket of complex numbers, and a real bucket with as many numbers as real and imaginary parts there."""

    def __init__(self) -> None:
        super().__init__()
        self.reals, self.few = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(5))
        self.complexes = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * self.reals.sum() + self.few.sum() + self.complexes.abs().sum()


def with_complex_ones(rank: int, world_size: int, hook: bool) -> list[tuple[int, int]]:
    with sending() as records:
        ddp = TorchDDP(Mixed(), bucket_cap_mb=1e-6)
        ddpobs.attach(ddp, telemetry=records.config)
        if hook:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        for step in range(4):
            ddp(batch(rank, step)).backward()
    return sorted(zip(records.spans("step"), records.spans("bucket"), strict=True))[-6:]


@pytest.mark.parametrize("hook", [False, True])
def test_complex_buckets_are_told_apart_from_real_ones_of_the_same_size(hook: bool) -> None:
    assert run_ranks(with_complex_ones, 2, hook) == [[(step, bucket) for step in (2, 3) for bucket in range(3)]] * 2


def unused(rank: int, world_size: int) -> dict[str, Any]:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.always, self.sometimes, self.never = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.sometimes(self.always(x)) if rank == 0 else self.always(x)  # type: ignore[no-any-return]

    results = {}
    for find in (True, False):
        with sending() as records:
            ddp = TorchDDP(Branching(), find_unused_parameters=find)
            ddpobs.attach(ddp, records.config)
            ddp(batch(rank)).sum().backward()
            if not find:
                with pytest.raises(RuntimeError, match="finished reduction"):
                    ddp(batch(rank))  # Before, another loss might have reached them.
        results["flag" if find else "no flag"] = [(u.locally, u.globally) for u in records.unused]
    return results


def test_unused_parameters_are_reported_also_without_the_flag() -> None:
    never, sometimes = ["never.weight", "never.bias"], ["sometimes.weight", "sometimes.bias"]
    first, second = run_ranks(unused, 2)
    assert first == {"flag": [(never, never)], "no flag": [(never, [])]}
    assert second == {"flag": [(sometimes + never, never)], "no flag": [(sometimes + never, [])]}


class Opaque(HostClock):
    """A clock with stamps that cannot be compared, as a device's events."""

    def __init__(self) -> None:
        self.now = lambda: SimpleNamespace(at_ns=time.monotonic_ns())  # type: ignore[assignment,return-value]

    def is_ready(self, stamp: Any) -> bool:
        return True

    def times(self, stamps: Sequence[Any]) -> Sequence[int]:
        return [stamp.at_ns if stamp else 0 for stamp in stamps]


def on_a_device(rank: int, world_size: int) -> dict[str, Any]:
    with sending() as records, mock.patch("ddpobs.telemetry.process.clock_for", return_value=Opaque()):
        ddp = TorchDDP(net(), **CAP)
        ddpobs.attach(ddp, records.config)
        train(ddp, rank)
    return summarise(records)


def test_a_devices_stamps_are_recorded_without_a_comparison() -> None:
    (records,) = run_ranks(on_a_device, 1)
    assert (records["steps"], records["ordered"]) == (4, True)
    assert records["spans"] > 4


def traces(ddp: Any) -> list[Any]:
    """The state of every place that telemetry changes."""
    return [
        [len(p._post_accumulate_grad_hooks or ()) for p in ddp.parameters()],
        [len(module._forward_pre_hooks) for module in ddp.modules()],
        sorted(ddp.__dict__),
        [getattr(TorchDDP, name) for name in ("_pre_forward", "_sync_buffers", "register_comm_hook", "forward")],
        [torch.autograd.backward, torch.save],
        sorted(thread.name for thread in threading.enumerate()),
        ddp.process_group,
    ]


def detached(rank: int, world_size: int) -> list[Any]:
    ddp = TorchDDP(net(), **CAP)
    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(lambda _: None).remove()
    before_attach = traces(ddp)
    with sending() as records:
        attachment = ddpobs.attach(ddp, records.config)
        assert attachment is not None
        same = ddpobs.attach(ddp, records.config) is attachment
        train(ddp, rank)
        attachment.detach()
        ended = telemetry._process is None
        after_detach = traces(ddp)
        again = train(ddp, rank)
        attachment.detach()
        ddpobs.attach(ddp, records.config)
        train(ddp, rank, 1)
    reference = TorchDDP(net(), **CAP)
    train(reference, rank)
    return [
        before_attach == after_detach,
        same,
        ended,
        equal(again, train(reference, rank)),
        len(records.steps("step")),
    ]


def test_detach_leaves_no_trace() -> None:
    assert run_ranks(detached, 2) == [[True, True, True, True, 5]] * 2


def collected(rank: int, world_size: int) -> list[Any]:
    module = net()
    with sending() as records:
        before_attach = traces(TorchDDP(module, **CAP))[3:-1]
        for _ in range(3):
            ddp = TorchDDP(module, **CAP)
            ddpobs.attach(ddp, records.config)
            train(ddp, rank)
            del ddp
            gc.collect()
        process = telemetry._process
        assert process is not None
        remaining = [len(process._recorders), process._journal.modules, len(process._journal.on_backward_end)]
        hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())
        attachment = ddpobs.attach(TorchDDP(module, **CAP), records.config)
        assert attachment is not None
        attachment.detach()
        ended = telemetry._process is None
        after_detach = traces(TorchDDP(module, **CAP))[3:-1]
    return [remaining, hooks, ended, before_attach == after_detach]


def test_a_collected_model_leaves_only_the_processs_telemetry_which_the_next_detach_ends() -> None:
    assert run_ranks(collected, 2) == [[[0, 0, 0], 0, True, True]] * 2


def refused(rank: int, world_size: int) -> list[Any]:
    messages = []
    for model in (nn.DataParallel(net()), net()):
        try:
            ddpobs.attach(model)
        except DdpobsError as error:
            messages.append(str(error))
    ours = ddpobs.DistributedDataParallel(net(), telemetry=False)
    return [*messages, ddpobs.attach(ours), ddpobs.attach(TorchDDP(net()), False)]


def test_a_model_that_is_no_ddp_is_refused_with_the_remedy() -> None:
    (data_parallel, module, ours, off), *_ = run_ranks(refused, 1)
    assert "torchrun" in data_parallel
    assert "Sequential" in module
    assert ours is None
    assert off is None
