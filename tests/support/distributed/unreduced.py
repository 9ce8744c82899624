"""Trainings whose optimizer may step on gradients that were not reduced, and the events of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
from ddpobs import DistributedDataParallel
from tests.support.distributed.compare import batch, net
from tests.support.distributed.sent import Sent, sending


class Training:
    """A model, its DDP module and an optimizer, of one kind of DDP."""

    def __init__(self, rank: int, kind: str, config: Any, **options: Any) -> None:
        self.rank, self.kind, self.config = rank, kind, config
        self.model: Any = net(wide=20)
        if options.pop("frozen", False):
            self.model[0].requires_grad_(False)
        self.ddp = self.wrap(self.model, **options)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def wrap(self, model: nn.Module, **options: Any) -> Any:
        if self.kind == "ours":
            return DistributedDataParallel(model, telemetry=self.config, **options)
        ddp = TorchDDP(model, **options)
        ddpobs.attach(ddp, self.config)
        return ddp

    def loss(self, step: int, model: Any = None) -> torch.Tensor:
        return (model or self.ddp)(batch(self.rank, step)).pow(2).mean()  # type: ignore[no-any-return]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def events_of(case: Callable[[Training], None], kind: str, rank: int, **options: Any) -> list[Any]:
    with sending() as sent:
        training = Training(rank, kind, sent.config, **options)
        dist.barrier()  # Otherwise rank 0 may end before rank 1 requests the run's id: nothing else holds it up.
        case(training)
        del training
    return relevant(sent)


def relevant(sent: Sent) -> list[Any]:
    return [
        (
            event.kind,
            event.detail.get("reason"),
            event.detail.get("parameters"),
            event.detail.get("count"),
            event.detail,
        )
        for batch in sent.batches
        for event in batch.events
        if event.kind in {"not_reduced", "never_synchronised", "exchanged"}
    ]
