"""Every communication hook of torch, and every method to register a hook, works unchanged on ours."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _BufferCommHookLocation

from tests.support.distributed.compare import CAP, batch, net, outcome, train
from tests.support.distributed.streams import stand_in_stream


def hooked(hook: Any, state: Any = lambda: None, **options: Any) -> Any:
    def case(kind: Any, rank: int) -> Any:
        ddp = kind(net(), **(options or CAP))
        ddp.register_comm_hook(state(), hook)
        return train(ddp, rank, 5)

    return case


def power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)


def renamed(hook: Any) -> Any:
    """Rename a hook: without NCCL torch refuses bf16 hooks by their names, although gloo sums bfloat16."""

    def bf16(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and no postponed ones
        return hook(state, bucket)

    return bf16


class _AsNccl:
    """An all-gather with all tensors stacked in its future, as NCCL's; the quantising hooks need this form."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._work = _ALL_GATHER(*args, **kwargs)

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda gathered: [torch.stack(gathered.value())])


_ALL_GATHER = dist.all_gather
_ORTHOGONALIZE: Any = powerSGD_hook._orthogonalize


def quantised(hook: Any) -> Any:
    def case(kind: Any, rank: int) -> Any:
        with mock.patch.object(dist, "all_gather", _AsNccl):
            return hooked(hook, lambda: dist.group.WORLD, bucket_cap_mb=25)(kind, rank)

    return case


def batched_power_sgd(kind: Any, rank: int) -> Any:
    """Torch's hook passes a single matrix to a function that takes batches."""

    def batched(matrices: torch.Tensor, epsilon: float = 0) -> None:
        _ORTHOGONALIZE(matrices if matrices.ndim == 3 else matrices[None], epsilon)

    with mock.patch.object(powerSGD_hook, "_orthogonalize", batched):
        return hooked(powerSGD_hook.batched_powerSGD_hook, power_sgd, bucket_cap_mb=25)(kind, rank)


def post_local_sgd(kind: Any, rank: int) -> Any:
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    ddp = kind(net(), **CAP)
    state = post_localSGD_hook.PostLocalSGDState(None, pairs[rank // 2], start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(ddp.parameters(), lr=0.05), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    return train(ddp, rank, 6, optimizer)


def user_defined(kind: Any, rank: int) -> Any:
    """A hook with its own state that uses every member of the bucket."""
    buckets: list[Any] = []

    def halving(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and no postponed ones
        state["calls"] += 1
        buckets.append(
            (bucket.index(), bucket.is_last(), [g.shape for g in bucket.gradients()], len(bucket.parameters()))
        )
        bucket.set_buffer(bucket.buffer() / 2)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    state = {"calls": 0}
    ddp = kind(net(), find_unused_parameters=True, **CAP)
    ddp.register_comm_hook(state, halving)
    return [train(ddp, rank), state["calls"], sorted(map(str, buckets))]


def builtin(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    return train(ddp, rank)


def twice(kind: Any, rank: int) -> Any:
    ddp = kind(net())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


def misnamed(kind: Any, rank: int) -> Any:
    def hook(state: Any, other: Any) -> Any: ...

    kind(net()).register_comm_hook(None, hook)


def misannotated(kind: Any, rank: int) -> Any:
    def hook(state: Any, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("the hook is refused")

    kind(net()).register_comm_hook(None, hook)


def not_callable(kind: Any, rank: int) -> Any:
    kind(net()).register_comm_hook(None, 1)


def returns_too_much(kind: Any, rank: int) -> Any:
    def hook(state: Any, bucket: GradBucket) -> int:
        return 1

    kind(net()).register_comm_hook(None, hook)


def fused_optimizer(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    ddp._register_fused_optim(torch.optim.SGD, lr=0.05)
    for step in range(3):
        ddp(batch(rank, step)).pow(2).mean().backward()
    return [p.detach().clone() for p in ddp.parameters()]


def optimizer_in_backward(kind: Any, rank: int) -> Any:
    module = net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    with stand_in_stream():
        ddp = kind(module, **CAP)
        for step in range(3):
            ddp(batch(rank, step)).pow(2).mean().backward()
    return [*(p.detach().clone() for p in ddp.parameters()), [p.grad is None for p in ddp.parameters()]]


def buffer_hook(location: Any) -> Any:
    def case(kind: Any, rank: int) -> Any:
        torch.manual_seed(5)
        ddp = kind(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        calls = []

        def averaging(state: Any, buffers: dict[str, torch.Tensor]) -> Any:
            calls.append(sorted(buffers))
            works = [
                dist.all_reduce(buffer, async_op=True) for buffer in buffers.values() if buffer.is_floating_point()
            ]
            if location == _BufferCommHookLocation.POST_FORWARD:
                return [work.get_future() for work in works]
            for work in works:  # The forward reads the buffers next.
                work.wait()
            return None

        ddp._register_buffer_comm_hook(None, averaging, location)
        for step in range(3):
            ddp(batch(rank, step)).sum().backward()
        return [outcome(ddp), calls, [buffer.clone() for buffer in ddp.buffers()]]

    return case


def zero(wrap: Any) -> Any:
    def case(kind: Any, rank: int) -> Any:
        ddp = kind(net(), **CAP)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.05
        )
        ddp.register_comm_hook(None, wrap(default_hooks.allreduce_hook, ddp, optimizer))
        return train(ddp, rank, 3, optimizer)

    return case


BF16_BY_NAME = "bf16, refused where torch has no NCCL"

CASES = {
    "allreduce": hooked(default_hooks.allreduce_hook),
    "fp16": hooked(default_hooks.fp16_compress_hook),
    "fp16 around all-reduce": hooked(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "fp16 around PowerSGD": hooked(
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power_sgd, bucket_cap_mb=25
    ),
    BF16_BY_NAME: hooked(default_hooks.bf16_compress_hook, bucket_cap_mb=25),
    "bf16": hooked(renamed(default_hooks.bf16_compress_hook), bucket_cap_mb=25),
    "bf16 around all-reduce": hooked(
        renamed(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)), bucket_cap_mb=25
    ),
    "quantised by tensor": quantised(quantization_hooks.quantization_pertensor_hook),
    "quantised by channel": quantised(quantization_hooks.quantization_perchannel_hook),
    "batched PowerSGD": batched_power_sgd,
    "quantised by tensor, fails on gloo": hooked(
        quantization_hooks.quantization_pertensor_hook, lambda: dist.group.WORLD
    ),
    "quantised by channel, fails on gloo": hooked(
        quantization_hooks.quantization_perchannel_hook, lambda: dist.group.WORLD
    ),
    "PowerSGD": hooked(powerSGD_hook.powerSGD_hook, power_sgd, bucket_cap_mb=25),
    "batched PowerSGD, fails in torch": hooked(powerSGD_hook.batched_powerSGD_hook, power_sgd, bucket_cap_mb=25),
    "post-localSGD": post_local_sgd,
    "noop": hooked(debugging_hooks.noop_hook),
    "a user's own": user_defined,
    "built in": builtin,
    "twice": twice,
    "misnamed": misnamed,
    "misannotated": misannotated,
    "not callable": not_callable,
    "returns a number": returns_too_much,
    "ZeRO overlap, refused on gloo": zero(ddp_zero_hook.hook_with_zero_step),
    "ZeRO interleaved, refused on gloo": zero(ddp_zero_hook.hook_with_zero_step_interleaved),
    "fused optimizer": fused_optimizer,
    "optimizer in backward": optimizer_in_backward,
    "buffers before forward": buffer_hook(_BufferCommHookLocation.PRE_FORWARD),
    "buffers after forward": buffer_hook(_BufferCommHookLocation.POST_FORWARD),
}


RAISE = {name for name in CASES if "on gloo" in name or "fails" in name}
RAISE |= {"twice", "misnamed", "misannotated", "not callable", "returns a number"}
if not dist.is_nccl_available():
    RAISE.add(BF16_BY_NAME)


@pytest.mark.parametrize("case", CASES)
def test_hooks_have_the_same_result_as_in_torch(verdicts_by_rank: list[dict[str, str]], case: str) -> None:
    assert {verdict[case] for verdict in verdicts_by_rank} == ({"raised"} if case in RAISE else {"equal"})
