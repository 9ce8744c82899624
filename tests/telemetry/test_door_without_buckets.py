"""The least that a door for another kind of training does, with `ddpobs.observers` and `telemetry.join` alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpobs import TelemetryConfig, telemetry
from tests.support.distributed.compare import batch, grad, net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending

STEPS = 5


class Door:
    """Reports the forwards and the backwards of a module whose gradients the script reduces, without any bucket."""

    def __init__(self, module: nn.Module, config: TelemetryConfig) -> None:
        assert dist.group.WORLD is not None
        observer = telemetry.join(module, config, dist.group.WORLD, {})
        assert observer is not None
        self.observer, self._last_ready = observer, observer.now()
        module.register_forward_pre_hook(lambda _, inputs: observer.forward_began(inputs))
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)
        observer.on_backward_end(self._backward_ended)

    def _ready(self, _: torch.Tensor) -> None:
        self._last_ready = self.observer.now()

    def _backward_ended(self, _raised: bool) -> None:
        record = self.observer.backward()
        assert record is not None
        record.last_ready = self._last_ready
        self.observer.finished(record)


def trained(rank: int, _size: int) -> dict[str, Any]:
    with sending() as sent:
        model = net()
        door, optimizer = Door(model, sent.config), torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(rank, step)).pow(2).mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(grad(parameter))
            optimizer.step()
        telemetry.leave(door.observer)
    columns = {name: sent.steps(name) for name in ("step", "collective", "samples", "backward_ns", "exposed_comm_ns")}
    return columns | {"readiness": sum(len(batch.readiness) for batch in sent.batches), "layouts": len(sent.layouts)}


def test_a_door_without_buckets_has_steps_phases_and_numbers_to_join_them_by() -> None:
    """A batch with readiness of a layout that was never reported would be refused."""
    for columns in run_ranks(trained, 2):
        assert columns["step"] == columns["collective"] == list(range(STEPS))
        assert columns["samples"] == [len(batch(0, 0))] * STEPS
        assert min(*columns["backward_ns"], *columns["exposed_comm_ns"]) > 0
        assert (columns["readiness"], columns["layouts"]) == (0, 0)
