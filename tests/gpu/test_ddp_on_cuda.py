"""DDP on CUDA devices: spans against torch.profiler's kernels, NCCL on a rank or two, gloo, graphs, two dtypes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.profiler import ProfilerActivity, profile

from ddpobs import DistributedDataParallel, attach
from tests.distributed.launch import run_ranks
from tests.distributed.sent import Sent, sending

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
STEPS = 12
TOLERANCE_NS = 50_000


@contextmanager
def nccl_alone() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("nccl", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def net(width: int = 2048) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).cuda()


def rows(width: int = 2048) -> torch.Tensor:
    return torch.randn(512, width, device="cuda")


def train(ddp: nn.Module, steps: int = STEPS, width: int = 2048, batch: torch.Tensor | None = None) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    batch = rows(width) if batch is None else batch
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()
        optimizer.step()
    torch.cuda.synchronize()


def profiled(kind: str, group: Any = None) -> tuple[Sent, list[tuple[int, int]], list[tuple[int, int]]]:
    """What telemetry sent, and the profiler's collectives and other kernels, as (begin, end) in wall ns."""
    with sending() as sent:
        if kind == "ours":
            ddp: Any = DistributedDataParallel(net(), process_group=group, telemetry=sent.config)
        else:
            ddp = TorchDDP(net(), process_group=group)
            attach(ddp, sent.config)
        train(ddp, 3)
        batch = rows()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            train(ddp, batch=batch)
    found = [event for event in profiler.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
    # What a range of the host's covers on the device, as of DDP's forward, is told like a kernel.
    events = [event for event in found if not event.is_user_annotation()]
    collectives = [(e.start_ns(), e.end_ns()) for e in events if "nccl" in e.name().lower()]
    others = [(e.start_ns(), e.end_ns()) for e in events if "nccl" not in e.name().lower()]
    return sent, sorted(collectives), sorted(others)


def wall_ns(sent: Sent, column: list[int]) -> np.ndarray[Any, Any]:
    anchor = sent.batches[-1].anchor
    return np.array(column) + anchor.wall_ns - anchor.monotonic_ns


def apart_ns(rank: int, world_size: int, kind: str) -> tuple[int, float, float, bool]:
    """Collectives for each bucket, how far off ends and begins are, and whether launches came before these."""
    torch.cuda.set_device(rank)
    sent, collectives, _ = profiled(kind, dist.new_group(backend="nccl"))
    spans = STEPS * len(sent.layouts[-1].buckets)
    launched, started, done = (
        np.sort(wall_ns(sent, sent.spans(column))[-spans:]) for column in ("launched_ns", "started_ns", "done_ns")
    )
    begins, ends = map(np.sort, np.array(collectives)[-spans:].T)
    before = bool((launched <= begins + TOLERANCE_NS).all())
    off = float(np.median(np.abs(done - ends))), float(np.median(np.abs(started - begins)))
    return len(collectives) // spans, *off, before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="on one rank NCCL launches nothing for a sum in place")
@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_spans_are_where_the_profiler_saw_the_collectives(kind: str) -> None:
    for each, ends_ns, begins_ns, before in run_ranks(apart_ns, 2, kind):
        assert each == 1
        assert ends_ns < TOLERANCE_NS
        assert begins_ns < TOLERANCE_NS
        assert before


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_steps_cover_the_devices_kernels(kind: str) -> None:
    with nccl_alone():
        sent, _, kernels = profiled(kind)
    begins, ends = (wall_ns(sent, sent.steps(column)) for column in ("start_ns", "end_ns"))
    assert (begins[1:] == ends[:-1]).all()
    busy = sum(end - begin for begin, end in kernels)
    assert busy <= (ends[-1] - begins[-STEPS]) * 1.05
    assert kernels[0][0] >= begins[-STEPS] - 10 * TOLERANCE_NS
    for phases in sent.phases()[-STEPS:]:
        assert phases["backward"] + phases["forward"] + phases["exposed_comm"] > 0.5 * sum(phases.values())


def on_gloo(rank: int, world_size: int) -> tuple[bool, bool]:
    with sending() as sent:
        ours = DistributedDataParallel(net(256), device_ids=[0], telemetry=sent.config)
        train(ours, 4, 256)
    theirs = TorchDDP(net(256), device_ids=[0])
    torch.manual_seed(rank)
    train(theirs, 4, 256)
    ready, launched, done = (sent.spans(column) for column in ("ready_ns", "launched_ns", "done_ns"))
    ordered = all(a <= b < c for a, b, c in zip(ready, launched, done, strict=True))
    return ordered, all(torch.isfinite(p).all() for p in ours.parameters())


def test_two_gloo_ranks_share_a_device() -> None:
    assert run_ranks(on_gloo, 2) == [(True, True)] * 2


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_captured_training_step_replays_and_telemetry_says_it_is_off(
    find_unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # Read as the process group is made.
    with nccl_alone(), sending() as sent:
        side = torch.cuda.Stream()
        batch = torch.randn(64, 256, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ddp = DistributedDataParallel(
                net(256), device_ids=[0], telemetry=sent.config, find_unused_parameters=find_unused
            )
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
            for _ in range(11):
                optimizer.zero_grad(set_to_none=True)
                ddp(batch).pow(2).mean().backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=side):  # On which gradients are accumulated, as DDP was built on it.
            loss = ddp(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
        losses = []
        for _ in range(5):
            graph.replay()
            losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert "cuda_graph_captured" in sent.events


@pytest.mark.parametrize("kind", [DistributedDataParallel, TorchDDP])
def test_mixed_precision_trains(kind: Any) -> None:
    with nccl_alone():
        precision = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
        ddp = kind(net(256), device_ids=[0], mixed_precision=precision)
        train(ddp, 3, 256)
        assert all(p.dtype == torch.float32 and bool(torch.isfinite(p).all()) for p in ddp.parameters())


def test_mixed_precision_gives_torchs_gradients() -> None:
    with nccl_alone():
        precision = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
        gradients = []
        for kind in (DistributedDataParallel, TorchDDP):
            ddp = kind(net(256), device_ids=[0], mixed_precision=precision)
            ddp(torch.ones(8, 256, device="cuda")).pow(2).mean().backward()
            torch.cuda.synchronize()
            gradients.append([p.grad.clone() for p in ddp.parameters()])
        assert all(map(torch.equal, *gradients))
