"""Works that telemetry keeps until it reads their duration; each keeps its bucket's memory alive."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel, attach
from ddpobs.attachment import attachment
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.reducer import bucket_times
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending


def works_kept(rank: int, world_size: int) -> dict[str, list[int]]:
    """Number of kept works in each of three backwards, as if gloo timed its collectives."""
    results: dict[str, list[int]] = {}
    for kind in ("ours", "torch's"):
        counts = results.setdefault(kind, [])
        with ExitStack() as stack:
            for module in (bucket_times, attachment):
                stack.enter_context(mock.patch.object(module, "time_collectives", return_value=True))
            finished = stack.enter_context(mock.patch.object(ModuleRecorder, "finished"))
            finished.side_effect = lambda record, counts=counts: counts.append(len(record.works))
            records = stack.enter_context(sending())
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
            if kind == "ours":
                ddp: TorchDDP = DistributedDataParallel(model, telemetry=records.config)
            else:
                ddp = TorchDDP(model)
                attach(ddp, records.config)
            for _ in range(3):
                ddp(torch.ones(2, 4)).sum().backward()
    return results


def test_no_work_is_kept_before_buckets_are_rebuilt() -> None:
    assert run_ranks(works_kept, 2) == [{"ours": [0, 1, 1], "torch's": [0, 1, 1]}] * 2
