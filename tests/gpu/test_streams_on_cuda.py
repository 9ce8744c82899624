"""Work on other streams, threads and processes: compression, a model on two devices, loader workers, process exit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.parameter_server import ParameterServer
from ddpobs import DistributedDataParallel, wire
from tests.support.cuda import nccl_alone, net, train
from tests.support.distributed.compare import grad
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
WIDTH = 4096


@pytest.mark.parametrize("comm", ["fp16", "bf16", "topk:1", "int8", ParameterServer])
def test_an_optimizer_waits_for_all_work_on_a_bucket(comm: Any) -> None:
    """Gradients read at once on the current stream equal the gradients after a synchronisation of the device."""
    with nccl_alone():
        ddp = DistributedDataParallel(net(WIDTH), device_ids=[0], comm=comm)
        for _ in range(5):
            ddp.zero_grad()
            ddp(torch.ones(8, WIDTH, device="cuda")).pow(2).mean().backward()
            early = [grad(p).clone() for p in ddp.parameters()]
            torch.cuda.synchronize()
            assert all(torch.equal(gradient, grad(p)) for gradient, p in zip(early, ddp.parameters(), strict=True))


def test_a_blocking_collective_is_recorded() -> None:
    with nccl_alone(), sending() as capture:
        ddp = DistributedDataParallel(net(256), device_ids=[0], telemetry=capture.config)
        for _ in range(4):
            ddp(torch.ones(8, 256, device="cuda")).sum().backward()
            dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    assert capture.comms("kind").count(wire.COMM_KINDS.index("user")) >= 3


def test_the_last_steps_and_the_goodbye_are_sent_without_a_synchronisation() -> None:
    with nccl_alone(), sending() as capture:
        ddp = DistributedDataParallel(net(WIDTH), device_ids=[0], telemetry=capture.config)
        for _ in range(10):
            ddp(torch.ones(4096, WIDTH, device="cuda")).sum().backward()
    assert len(capture.steps("step")) == 10
    assert capture.events[-1] == "goodbye"


def test_a_loader_with_workers_runs_with_telemetry() -> None:
    with nccl_alone(), sending() as capture:
        ddp = DistributedDataParallel(net(256), device_ids=[0], telemetry=capture.config)
        loader = DataLoader(TensorDataset(torch.ones(64, 256)), batch_size=8, num_workers=2)
        for _ in range(3):
            for (rows,) in loader:
                ddp(rows.cuda()).sum().backward()
        torch.cuda.synchronize()
    assert len(capture.steps("step")) == 24


class OverDevices(nn.Module):
    """Layers alternate between two devices, so that autograd computes gradients on two threads at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256).to(f"cuda:{index % 2}") for index in range(12))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs = [layer(rows.to(layer.get_parameter("weight").device)).to("cuda:0") for layer in self.layers]
        return torch.stack(outputs).sum(0)


def train_over_devices(rank: int, world_size: int) -> bool:
    parameters: list[Any] = []
    for kind in (TorchDDP, DistributedDataParallel):
        ddp = kind(OverDevices(), bucket_cap_mb=0.3)
        torch.manual_seed(rank)
        train(ddp, 6, 256)
        parameters.append([p.detach().cpu() for p in ddp.parameters()])
    return all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(*parameters, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, and this machine has fewer")
def test_a_model_on_two_devices_is_reduced_as_by_torch() -> None:
    assert run_ranks(train_over_devices, 2, gpu=True) == [True, True]
