"""Ours among the rest of torch: autocast, scalers, compilation, checkpoints on disk, debug levels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel
from ddpobs.comm import Bf16, Fp16
from ddpobs.errors import ModelsDifferError
from tests.distributed.compare import batch, net, outcome, train, verdicts
from tests.distributed.launch import run_ranks

CAP = {"bucket_cap_mb": 0.05}


def autocast(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(batch(rank, step)).float().pow(2).mean()
        loss.backward()
    return outcome(ddp)


def scaled(kind: Any, rank: int) -> Any:
    """One step overflows on one rank: the optimizer is skipped on every rank, and the scale falls."""
    ddp = kind(net(), **CAP)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(batch(rank, step)).pow(2).mean()
        if step == 1 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [[p.detach().clone() for p in ddp.parameters()], scales]


def compiled_around(kind: Any, rank: int) -> Any:
    ddp = kind(net(600), bucket_cap_mb=1)
    compiled = torch.compile(ddp, backend="aot_eager")
    for step in range(3):
        compiled(batch(rank, step)).pow(2).mean().backward()
    return outcome(ddp)


def compiled_inside(kind: Any, rank: int) -> Any:
    ddp = kind(torch.compile(net(), backend="aot_eager"))
    for step in range(3):
        ddp(batch(rank, step)).pow(2).mean().backward()
    return outcome(ddp)


def split_at_buckets(kind: Any, rank: int) -> Any:
    """The graphs into which DDPOptimizer cuts the model, which asks the active DDP module for its bucket size."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    ddp = kind(nn.Sequential(*(nn.Linear(512, 512) for _ in range(5))), bucket_cap_mb=1)
    compiled = torch.compile(ddp, backend=counter)
    compiled(torch.ones(2, 512)).sum().backward()
    return [counter.frame_count, counter.frame_count > 2]


def distributed_checkpoint(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    train(ddp, rank)
    with TemporaryDirectory() as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = [own]
        dist.broadcast_object_list(folder)
        dcp.save(get_model_state_dict(ddp), checkpoint_id=folder[0])
        fresh = kind(net(), **CAP)
        state = get_model_state_dict(fresh)
        dcp.load(state, checkpoint_id=folder[0])
        dist.barrier()
    set_model_state_dict(fresh, state)
    return [outcome(fresh), sorted(state), sorted(ddp.state_dict())]


def loaded_state(kind: Any, rank: int) -> Any:
    """A state dict of torch's DDP goes into ours, and back."""
    first, second = kind(net()), TorchDDP(net())
    train(first, rank)
    second.load_state_dict(first.state_dict())
    return train(second, rank)


def clipped(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    norms = []
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step)).pow(2).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1))
    return [outcome(ddp), norms]


def evaluated(kind: Any, rank: int) -> Any:
    ddp = kind(net())
    train(ddp, rank)
    ddp.eval()
    with torch.no_grad():
        without = ddp(batch(rank))
    with torch.inference_mode():
        return [without, ddp(batch(rank)).clone()]


def wrapped_attributes(kind: Any, rank: int) -> Any:
    ddp = kind(net())
    return [isinstance(ddp, TorchDDP), type(ddp.module).__name__, ddp.device_type, ddp.require_backward_grad_sync]


class Forked(nn.Module):
    """A branch that only some steps take, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor, both: bool) -> torch.Tensor:
        rows = self.always(rows)
        return self.sometimes(rows) if both else rows


def used_parameters(kind: Any, rank: int) -> Any:
    torch.manual_seed(0)
    ddp = kind(Forked(), find_unused_parameters=True)
    found = []
    for step, both in enumerate((True, rank == 0, rank == 0, False, rank > 0)):
        ddp(batch(rank, step), both).sum().backward()
        found += [ddp.reducer._get_local_used_map().clone(), ddp.reducer._ddp_graph_static()]
    return found


def static_graphs(kind: Any, rank: int) -> Any:
    found = []
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        ddp = kind(net(), **CAP, **options)
        train(ddp, rank)
        found.append(ddp.reducer._ddp_graph_static())
    return found


def buckets_of_zeros(kind: Any, rank: int) -> Any:
    """What torch's `join` has a rank without data do: the buckets' shapes, and the others' sums."""
    ddp = kind(net(), bucket_cap_mb=1)
    train(ddp, rank)
    found = []
    for bucket in ddp.reducer._get_zeros_like_grad_buckets():
        found += [bucket.buffer().clone(), torch.tensor([bucket.index(), bucket.is_last()])]
        bucket.buffer().fill_(rank + 1.0)
        value = ddp.reducer._run_comm_hook(bucket).wait()
        found.append(value[0] if isinstance(value, list) else value)
    return [*found, outcome(ddp)]


def hooked_buckets_of_zeros(kind: Any, rank: int) -> Any:
    ddp = kind(net(), bucket_cap_mb=1)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(ddp, rank)
    found = []
    for bucket in ddp.reducer._get_zeros_like_grad_buckets():
        bucket.buffer().fill_(rank + 0.1)
        found.append(ddp.reducer._run_comm_hook(bucket).wait())
    return found


def backward_stats(kind: Any, rank: int) -> Any:
    """When each gradient came: the last layer's first, and all after the first one."""
    ddp = kind(net())
    train(ddp, rank)
    after_ns = ddp.reducer.get_backward_stats()
    assert min(after_ns) >= 0, after_ns
    assert max(after_ns[4:]) < min(after_ns[:2]), after_ns
    return len(after_ns)


def lbfgs(kind: Any, rank: int) -> Any:
    ddp = kind(net(16), **CAP)
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ddp(batch(0)).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return outcome(ddp)


CASES = {
    function.__name__: function
    for function in (
        autocast,
        scaled,
        compiled_around,
        compiled_inside,
        split_at_buckets,
        distributed_checkpoint,
        loaded_state,
        clipped,
        evaluated,
        wrapped_attributes,
        lbfgs,
        used_parameters,
        static_graphs,
        buckets_of_zeros,
        hooked_buckets_of_zeros,
        backward_stats,
    )
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_torch(found: list[dict[str, str]], case: str) -> None:
    assert {verdict[case] for verdict in found} == {"equal"}


def sparse_bucket_of_zeros(rank: int, world_size: int) -> list[list[float]]:
    """Torch's reducer gives none where gradients are sparse."""
    ddp = DistributedDataParallel(nn.Embedding(3, 1, sparse=True))
    (bucket,) = ddp.reducer._get_zeros_like_grad_buckets()
    own = torch.sparse_coo_tensor([[rank]], [[2.0]], (3, 1))
    bucket.bucket.parameters[0].grad = own
    return ddp.reducer._run_comm_hook(bucket).wait().to_dense().tolist()  # type: ignore[no-any-return]


def test_the_sum_of_a_sparse_bucket_is_given() -> None:
    assert run_ranks(sparse_bucket_of_zeros, 2) == [[[2.0], [2.0], [0.0]]] * 2


def different_models(rank: int, world_size: int) -> list[str]:
    models = [
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3 if rank == 1 else 2)),
        nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if rank == 2 else [])),
        nn.Linear(4, 4).double() if rank == 0 else nn.Linear(4, 4),
        nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last if rank else torch.contiguous_format),
    ]
    told = []
    for model in models:
        try:
            DistributedDataParallel(model)
            told.append("no error")
        except ModelsDifferError as error:
            told.append(str(error))
    return told


def test_ranks_that_built_different_models_get_the_same_message() -> None:
    first, *others = run_ranks(different_models, 3)
    assert all(other == first for other in others)
    shapes, counts, dtypes, strides = first
    assert "1.weight [2, 8] float32" in shapes
    assert "on rank 0, 2" in shapes
    assert "1.weight [3, 8] float32" in shapes
    assert "2 parameters on rank 0, 1 but 4 parameters on rank 2" in counts
    assert "float64" in dtypes
    assert "strides [36, 1, 12, 4]" in strides


def normed(counts: bool) -> nn.Module:
    """With buffers or without."""
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, track_running_stats=counts))


def with_buffer(size: int) -> nn.Module:
    module = net()
    module.register_buffer("scale", torch.zeros(size))
    return module


def otherwise_different(rank: int, world_size: int) -> list[str]:
    """What differs on rank 1 besides the parameters' shapes."""
    odd = rank == 1
    builds: list[Callable[[], Any]] = [
        lambda: DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4, sparse=odd))),
        lambda: DistributedDataParallel(normed(not odd)),
        lambda: DistributedDataParallel(with_buffer(3 + odd)),
        lambda: DistributedDataParallel(net(), find_unused_parameters=odd),
        lambda: DistributedDataParallel(net(), static_graph=odd),
        lambda: DistributedDataParallel(net(), find_unused_parameters=True, skip_all_reduce_unused_params=odd),
        lambda: DistributedDataParallel(net(), forward_sync_buffers=odd),
        lambda: DistributedDataParallel(net(), comm="int8" if odd else None),
        lambda: DistributedDataParallel(net(), comm=Bf16 if odd else Fp16),
        lambda: DistributedDataParallel(net(), round_robin_groups=1 + odd),
    ]
    told = []
    for build in builds:
        with pytest.raises(ModelsDifferError) as error:
            build()
        told.append(str(error.value).removeprefix("the ranks built different models: ").split(". Build")[0])
    return told


def test_ranks_that_differ_in_anything_that_collectives_follow_from_are_told_in_what() -> None:
    expected = [
        "parameter 0 is 0.weight [9, 4] float32 (strides [4, 1]) on rank 0 but "
        "0.weight [9, 4] float32 (strides [4, 1], sparse gradients) on rank 1",
        "the model is 3 buffers on rank 0 but 0 buffers on rank 1",
        "buffer 0 is scale [3] float32 on rank 0 but scale [4] float32 on rank 1",
        *(
            f"{flag} is False on rank 0 but True on rank 1"
            for flag in (
                "find_unused_parameters",
                "static_graph",
                "skip_all_reduce_unused_params",
                "forward_sync_buffers",
            )
        ),
        "comm is all_reduce on rank 0 but int8 on rank 1",
        "comm is Fp16 on rank 0 but Bf16 on rank 1",
        "round_robin_groups is 1 on rank 0 but 2 on rank 1",
    ]
    assert run_ranks(otherwise_different, 2, timeout_s=30) == [expected] * 2


def capped_differently(rank: int, world_size: int) -> dict[str, str]:
    def case(kind: Any, rank: int) -> Any:
        return train(kind(net(), bucket_cap_mb=1e-5 if rank else 0.05), rank)

    def own_buffers(kind: Any, rank: int) -> Any:
        """Which nobody compares where nobody sends them."""
        return train(kind(with_buffer(3 + rank), broadcast_buffers=False), rank)

    return verdicts({"caps": case, "buffers": own_buffers}, rank)


def test_ranks_may_differ_in_what_torch_takes_from_rank_0_or_does_not_send() -> None:
    assert run_ranks(capped_differently, 2, timeout_s=30) == [{"caps": "equal", "buffers": "equal"}] * 2


def debugged(rank: int, world_size: int) -> str:
    flags: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for options in flags:
        train(DistributedDataParallel(net(), **options), rank)
    return dist.get_debug_level().name


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_every_debug_level_trains(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    assert run_ranks(debugged, 2) == [level] * 2
