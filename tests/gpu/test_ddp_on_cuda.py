"""DDP on CUDA devices: spans against torch.profiler's kernels, NCCL on one or two ranks, gloo, graphs, two dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.profiler import ProfilerActivity, profile

from ddpobs import DistributedDataParallel, attach
from tests.support.cuda import STEPS, nccl_alone, net, rows, train
from tests.support.distributed.compare import grad
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import Sent, sending

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
TOLERANCE_NS = 50_000


def profiled(kind: str, group: Any = None) -> tuple[Sent, list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the captured telemetry, the profiler's collectives and its other kernels, as (begin, end) in wall ns."""
    with sending() as capture:
        if kind == "ours":
            ddp: Any = DistributedDataParallel(net(), process_group=group, telemetry=capture.config)
        else:
            ddp = TorchDDP(net(), process_group=group)
            attach(ddp, capture.config)
        train(ddp, 3)
        batch = rows()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            train(ddp, batch=batch)
    on_device = [event for event in profiler.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
    # The profiler also lists host ranges, such as DDP's forward, as device events.
    events = [event for event in on_device if not event.is_user_annotation()]
    collectives = [(e.start_ns(), e.end_ns()) for e in events if "nccl" in e.name().lower()]
    kernels = [(e.start_ns(), e.end_ns()) for e in events if "nccl" not in e.name().lower()]
    return capture, sorted(collectives), sorted(kernels)


def wall_ns(capture: Sent, column: list[int]) -> np.ndarray[Any, Any]:
    anchor = capture.batches[-1].anchor
    return np.array(column) + anchor.wall_ns - anchor.monotonic_ns


def span_errors(rank: int, world_size: int, kind: str) -> tuple[int, float, float, bool]:
    """Compare spans with the profiler's collectives.

    Returns:
        Collectives per bucket span, median errors of ends and begins in ns, and whether all launches precede the
        begins.
    """
    torch.cuda.set_device(rank)
    capture, collectives, _ = profiled(kind, dist.new_group(backend="nccl"))
    spans = STEPS * len(capture.layouts[-1].buckets)
    launched, started, done = (
        np.sort(wall_ns(capture, capture.spans(column))[-spans:]) for column in ("launched_ns", "started_ns", "done_ns")
    )
    begins, ends = map(np.sort, np.array(collectives)[-spans:].T)
    launched_first = bool((launched <= begins + TOLERANCE_NS).all())
    errors_ns = float(np.median(np.abs(done - ends))), float(np.median(np.abs(started - begins)))
    return len(collectives) // spans, *errors_ns, launched_first


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="on one rank NCCL launches no kernel for an in-place sum")
@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_spans_agree_with_the_profilers_collectives(kind: str) -> None:
    for collectives_per_span, end_error_ns, begin_error_ns, launched_first in run_ranks(span_errors, 2, kind, gpu=True):
        assert collectives_per_span == 1
        assert end_error_ns < TOLERANCE_NS
        assert begin_error_ns < TOLERANCE_NS
        assert launched_first


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_steps_cover_the_devices_kernels(kind: str) -> None:
    with nccl_alone():
        capture, _, kernels = profiled(kind)
    begins, ends = (wall_ns(capture, capture.steps(column)) for column in ("start_ns", "end_ns"))
    assert (begins[1:] == ends[:-1]).all()
    busy = sum(end - begin for begin, end in kernels)
    assert busy <= (ends[-1] - begins[-STEPS]) * 1.05
    assert kernels[0][0] >= begins[-STEPS] - 10 * TOLERANCE_NS
    for phases in capture.phases()[-STEPS:]:
        assert phases["backward"] + phases["forward"] + phases["exposed_comm"] > 0.5 * sum(phases.values())


def train_on_gloo(rank: int, world_size: int) -> tuple[bool, bool]:
    with sending() as capture:
        ours = DistributedDataParallel(net(256), device_ids=[0], telemetry=capture.config)
        train(ours, 4, 256)
    theirs = TorchDDP(net(256), device_ids=[0])
    torch.manual_seed(rank)
    train(theirs, 4, 256)
    ready, launched, done = (capture.spans(column) for column in ("ready_ns", "launched_ns", "done_ns"))
    ordered = all(a <= b < c for a, b, c in zip(ready, launched, done, strict=True))
    return ordered, all(torch.isfinite(p).all() for p in ours.parameters())


def test_two_gloo_ranks_share_a_device() -> None:
    assert run_ranks(train_on_gloo, 2, gpu=True) == [(True, True)] * 2


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_captured_training_step_replays_and_telemetry_reports_that_it_is_off(
    find_unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # Read when the process group is created.
    with nccl_alone(), sending() as capture:
        side = torch.cuda.Stream()
        batch = torch.randn(64, 256, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ddp = DistributedDataParallel(
                net(256), device_ids=[0], telemetry=capture.config, find_unused_parameters=find_unused
            )
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
            for _ in range(11):
                optimizer.zero_grad(set_to_none=True)
                ddp(batch).pow(2).mean().backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=side):  # DDP was built on this stream, and accumulates gradients on it.
            loss = ddp(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
        losses = []
        for _ in range(5):
            graph.replay()
            losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert "cuda_graph_captured" in capture.events


@pytest.mark.parametrize("kind", [DistributedDataParallel, TorchDDP])
def test_mixed_precision_trains(kind: Any) -> None:
    with nccl_alone():
        precision = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
        ddp = kind(net(256), device_ids=[0], mixed_precision=precision)
        train(ddp, 3, 256)
        assert all(p.dtype == torch.float32 and bool(torch.isfinite(p).all()) for p in ddp.parameters())


def test_mixed_precision_gives_the_gradients_of_a_model_in_half_precision() -> None:
    """Torch's own first gradients are wrong here, by a factor of 50 to 490 (torch 2.11)."""
    with nccl_alone():
        half = net(256).half()
        half(torch.ones(8, 256, device="cuda", dtype=torch.float16)).pow(2).mean().backward()
        precision = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
        ddp = DistributedDataParallel(net(256), device_ids=[0], mixed_precision=precision)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(8, 256, device="cuda")).pow(2).mean().backward()
            torch.cuda.synchronize()
            pairs = zip(ddp.parameters(), half.parameters(), strict=True)
            assert all(torch.equal(grad(ours), grad(exact).float()) for ours, exact in pairs)
