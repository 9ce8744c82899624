"""Our DDP with other features of torch: autocast, scalers, compilation, checkpoints on disk, debug levels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import get_debug_level
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel
from ddpobs.comm import Bf16, Fp16, TopK
from ddpobs.errors import ModelsDifferError
from tests.support.distributed.compare import CAP, batch, net, outcome, train, verdicts
from tests.support.distributed.launch import run_ranks


def autocast(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(batch(rank, step)).float().pow(2).mean()
        loss.backward()
    return outcome(ddp)


def gradient_scaler(kind: Any, rank: int) -> Any:
    """Let one step overflow on one rank: every rank skips the optimizer and lowers the scale."""
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
    compiled: Any = torch.compile(ddp, backend="aot_eager")
    for step in range(3):
        compiled(batch(rank, step)).pow(2).mean().backward()
    return outcome(ddp)


def compiled_inside(kind: Any, rank: int) -> Any:
    ddp = kind(torch.compile(net(), backend="aot_eager"))
    for step in range(3):
        ddp(batch(rank, step)).pow(2).mean().backward()
    return outcome(ddp)


def split_at_buckets(kind: Any, rank: int) -> Any:
    """Count the graphs into which DDPOptimizer cuts the model, by the bucket size of the active DDP module."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    ddp = kind(nn.Sequential(*(nn.Linear(512, 512) for _ in range(5))), bucket_cap_mb=1)
    compiled: Any = torch.compile(ddp, backend=counter)
    compiled(torch.ones(2, 512)).sum().backward()
    return [counter.frame_count, counter.frame_count > 2]


def distributed_checkpoint(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    train(ddp, rank)
    with TemporaryDirectory() as local, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = [local]
        dist.broadcast_object_list(folder)
        save(get_model_state_dict(ddp), checkpoint_id=folder[0])
        fresh = kind(net(), **CAP)
        state = get_model_state_dict(fresh)
        load(state, checkpoint_id=folder[0])
        dist.barrier()
    set_model_state_dict(fresh, state)
    return [outcome(fresh), sorted(state), sorted(ddp.state_dict())]


def loaded_state(kind: Any, rank: int) -> Any:
    """Load a state dict of each DDP into torch's DDP, and train on."""
    first, second = kind(net()), TorchDDP(net())
    train(first, rank)
    second.load_state_dict(first.state_dict())
    return train(second, rank)


def gradient_clipping(kind: Any, rank: int) -> Any:
    ddp = kind(net(), **CAP)
    norms = []
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step)).pow(2).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1))
    return [outcome(ddp), norms]


def evaluation(kind: Any, rank: int) -> Any:
    ddp = kind(net())
    train(ddp, rank)
    ddp.eval()
    with torch.no_grad():
        output = ddp(batch(rank))
    with torch.inference_mode():
        return [output, ddp(batch(rank)).clone()]


def wrapped_attributes(kind: Any, rank: int) -> Any:
    ddp = kind(net())
    return [isinstance(ddp, TorchDDP), type(ddp.module).__name__, ddp.device_type, ddp.require_backward_grad_sync]


class OptionalLayer(nn.Module):
    """A layer that only some steps use, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor, uses_both: bool) -> torch.Tensor:
        rows = self.always(rows)
        return self.sometimes(rows) if uses_both else rows


def used_parameters(kind: Any, rank: int) -> Any:
    torch.manual_seed(0)
    ddp = kind(OptionalLayer(), find_unused_parameters=True)
    results = []
    for step, uses_both in enumerate((True, rank == 0, rank == 0, False, rank > 0)):
        ddp(batch(rank, step), uses_both).sum().backward()
        results += [ddp.reducer._get_local_used_map().clone(), ddp.reducer._ddp_graph_static()]
    return results


def static_graphs(kind: Any, rank: int) -> Any:
    are_static = []
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        ddp = kind(net(), **CAP, **options)
        train(ddp, rank)
        are_static.append(ddp.reducer._ddp_graph_static())
    return are_static


def buckets_of_zeros(kind: Any, rank: int) -> Any:
    """Reduce buckets of zeros, as torch's `join` does on a rank without data: the shapes and the sums."""
    ddp = kind(net(), bucket_cap_mb=1)
    train(ddp, rank)
    results = []
    for bucket in ddp.reducer._get_zeros_like_grad_buckets():
        results += [bucket.buffer().clone(), torch.tensor([bucket.index(), bucket.is_last()])]
        bucket.buffer().fill_(rank + 1.0)
        value = ddp.reducer._run_comm_hook(bucket).wait()
        results.append(value[0] if isinstance(value, list) else value)
    return [*results, outcome(ddp)]


def hooked_buckets_of_zeros(kind: Any, rank: int) -> Any:
    ddp = kind(net(), bucket_cap_mb=1)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(ddp, rank)
    results = []
    for bucket in ddp.reducer._get_zeros_like_grad_buckets():
        bucket.buffer().fill_(rank + 0.1)
        results.append(ddp.reducer._run_comm_hook(bucket).wait())
    return results


def backward_stats(kind: Any, rank: int) -> Any:
    """Check the arrival times of the gradients: the last layer's come before the first layer's."""
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
        loss: torch.Tensor = ddp(batch(0)).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return outcome(ddp)


CASES = {
    function.__name__: function
    for function in (
        autocast,
        gradient_scaler,
        compiled_around,
        compiled_inside,
        split_at_buckets,
        distributed_checkpoint,
        loaded_state,
        gradient_clipping,
        evaluation,
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
def test_results_equal_those_of_torch(verdicts_by_rank: list[dict[str, str]], case: str) -> None:
    assert {verdict[case] for verdict in verdicts_by_rank} == {"equal"}


def sparse_bucket_of_zeros(rank: int, world_size: int) -> list[list[float]]:
    """Reduce a sparse bucket of zeros, which torch's reducer does not support."""
    ddp = DistributedDataParallel(nn.Embedding(3, 1, sparse=True))
    (bucket,) = ddp.reducer._get_zeros_like_grad_buckets()
    gradient = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([[2.0]]), (3, 1))
    bucket.bucket.parameters[0].grad = gradient
    return ddp.reducer._run_comm_hook(bucket).wait().to_dense().tolist()  # type: ignore[no-any-return]


def test_a_sparse_bucket_of_zeros_is_summed() -> None:
    assert run_ranks(sparse_bucket_of_zeros, 2) == [[[2.0], [2.0], [0.0]]] * 2


def different_models(rank: int, world_size: int) -> list[str]:
    convolution: Any = nn.Conv2d(4, 4, 3)
    models = [
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3 if rank == 1 else 2)),
        nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if rank == 2 else [])),
        nn.Linear(4, 4).double() if rank == 0 else nn.Linear(4, 4),
        convolution.to(memory_format=torch.channels_last if rank else torch.contiguous_format),
    ]
    messages = []
    for model in models:
        try:
            DistributedDataParallel(model)
            messages.append("no error")
        except ModelsDifferError as error:
            messages.append(str(error))
    return messages


def test_ranks_that_built_different_models_get_the_same_message() -> None:
    first, *further = run_ranks(different_models, 3)
    assert all(messages == first for messages in further)
    shapes, counts, dtypes, strides = first
    assert "1.weight [2, 8] float32" in shapes
    assert "on rank 0, 2" in shapes
    assert "1.weight [3, 8] float32" in shapes
    assert "2 parameters on rank 0, 1 but 4 parameters on rank 2" in counts
    assert "float64" in dtypes
    assert "strides [36, 1, 12, 4]" in strides


def batch_norm(has_buffers: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, track_running_stats=has_buffers))


def with_buffer(size: int) -> nn.Module:
    module = net()
    module.register_buffer("scale", torch.zeros(size))
    return module


def hooked(module: nn.Module, has_hook: bool) -> nn.Module:
    ddp = DistributedDataParallel(module)
    if has_hook:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def differences_on_rank_1(rank: int, world_size: int) -> list[str]:
    """Return the reported difference of each case in which rank 1 differs, besides the parameters' shapes."""
    odd = rank == 1
    builds: list[Callable[[], Any]] = [
        lambda: DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4, sparse=odd))),
        lambda: DistributedDataParallel(batch_norm(not odd)),
        lambda: DistributedDataParallel(with_buffer(3 + odd)),
        lambda: DistributedDataParallel(net(), find_unused_parameters=odd),
        lambda: DistributedDataParallel(net(), static_graph=odd),
        lambda: DistributedDataParallel(net(), find_unused_parameters=True, skip_all_reduce_unused_params=odd),
        lambda: DistributedDataParallel(net(), forward_sync_buffers=odd),
        lambda: DistributedDataParallel(net(), comm="int8" if odd else None),
        lambda: DistributedDataParallel(net(), comm=Bf16 if odd else Fp16),
        lambda: DistributedDataParallel(net(), round_robin_groups=1 + odd),
        lambda: DistributedDataParallel(net(), gradient_as_bucket_view=odd),
        lambda: DistributedDataParallel(net(), comm=f"powersgd:{1 + odd}"),
        lambda: DistributedDataParallel(net(), comm=partial(TopK, density=0.1 * (1 + odd))),
        lambda: train(hooked(net(), odd), rank),
    ]
    messages = []
    for build in builds:
        with pytest.raises(ModelsDifferError) as error:
            build()
        messages.append(str(error.value).removeprefix("the ranks built different models: ").split(". Build")[0])
    return messages


def test_a_difference_between_ranks_that_changes_the_collectives_is_named() -> None:
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
        "gradient_as_bucket_view is False on rank 0 but True on rank 1",
        "comm is powersgd:1 on rank 0 but powersgd:2 on rank 1",
        "comm is TopK(density=0.1) on rank 0 but TopK(density=0.2) on rank 1",
        "the communication hook or strategy is all_reduce on rank 0 but fp16_compress_hook on rank 1",
    ]
    assert run_ranks(differences_on_rank_1, 2) == [expected] * 2


def tolerated_differences(rank: int, world_size: int) -> dict[str, str]:
    def different_caps(kind: Any, rank: int) -> Any:
        return train(kind(net(), bucket_cap_mb=1e-5 if rank else 0.05), rank)

    def local_buffers(kind: Any, rank: int) -> Any:
        """Buffers that are not broadcast are not compared."""
        return train(kind(with_buffer(3 + rank), broadcast_buffers=False), rank)

    return verdicts({"caps": different_caps, "buffers": local_buffers}, rank)


def test_ranks_may_differ_in_bucket_caps_and_in_buffers_that_are_not_broadcast() -> None:
    assert run_ranks(tolerated_differences, 2) == [{"caps": "equal", "buffers": "equal"}] * 2


def train_at_debug_level(rank: int, world_size: int) -> str:
    flags: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for options in flags:
        train(DistributedDataParallel(net(), **options), rank)
    return get_debug_level().name


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_every_debug_level_trains(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    assert run_ranks(train_at_debug_level, 2) == [level] * 2
