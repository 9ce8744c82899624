"""Which collectives are kept until they are read: each keeps the memory that it reduced."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel, attach
from ddpobs.attachment import attachment
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.reducer import reducer
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending


def works_kept(rank: int, world_size: int) -> dict[str, list[int]]:
    """How many in each of three backwards, as if gloo's told how long they took."""
    found: dict[str, list[int]] = {}
    for kind in ("ours", "torch's"):
        kept = found.setdefault(kind, [])
        with ExitStack() as stack:
            for module in (reducer, attachment):
                stack.enter_context(mock.patch.object(module, "time_collectives", return_value=True))
            noted = stack.enter_context(mock.patch.object(ModuleRecorder, "finished"))
            noted.side_effect = lambda record, kept=kept: kept.append(len(record.works))
            sent = stack.enter_context(sending())
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
            if kind == "ours":
                ddp: TorchDDP = DistributedDataParallel(model, telemetry=sent.config)
            else:
                ddp = TorchDDP(model)
                attach(ddp, sent.config)
            for _ in range(3):
                ddp(torch.ones(2, 4)).sum().backward()
    return found


def test_buckets_that_are_laid_anew_next_are_kept_by_no_work() -> None:
    assert run_ranks(works_kept, 2) == [{"ours": [0, 1, 1], "torch's": [0, 1, 1]}] * 2
