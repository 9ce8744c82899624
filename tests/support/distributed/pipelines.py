"""Pipelines of two ranks by two replicas on four gloo ranks, and the same training in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, ROWS = 8, 8
PIPELINES, STAGES = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
"""Ranks that send to each other, and ranks that hold the same stages."""
Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]


class Pause(torch.autograd.Function):
    """Computation of a given length, without a processor."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, pause_s: float, stamps: list[tuple[int, int]]) -> torch.Tensor:
        ctx.pause_s, ctx.stamps = pause_s, stamps
        time.sleep(pause_s)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        began_ns = time.monotonic_ns()
        time.sleep(ctx.pause_s)
        ctx.stamps.append((began_ns, time.monotonic_ns()))
        return gradients[0], None, None


class Layer(nn.Module):
    """A linear layer that takes `pause_s` in each direction; `stamps` has begin and end of each pause in backward."""

    def __init__(self, pause_s: float = 0.0, wide: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)
        self.pause_s, self.stamps = pause_s, list[tuple[int, int]]()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = torch.tanh(self.down(self.up(inputs)))
        if self.pause_s:
            outputs = Pause.apply(outputs, self.pause_s, self.stamps)  # type: ignore[no-untyped-call]
        return outputs


def models(layers: Sequence[Sequence[Layer]]) -> list[nn.Module]:
    """Return one module per stage."""
    return [nn.Sequential(*own) for own in layers]


def equal_models(stages: int) -> list[nn.Module]:
    """Return the same stages on every rank, in double precision."""
    torch.manual_seed(0)
    return [stage.double() for stage in models([[Layer(), Layer()] for _ in range(stages)])]


def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's pipeline and its stage's replicas; a collective call."""
    own = [
        next(group for group, members in zip(made, ranks, strict=True) if dist.get_rank() in members)
        for ranks in (PIPELINES, STAGES)
        for made in [[dist.new_group(members) for members in ranks]]
    ]
    return own[0], own[1]


class Pipeline:
    """A schedule on this rank.

    Args:
        schedule: Name of torch's class.
        stages: Modules of all stages; a rank of two holds every second one.
        wrap: Wraps a stage's module over its replicas.
        micro_batches: Micro-batches of a step.
        on_groups: The rank's pipeline and replicas.
        shapes: Give torch the shapes between the stages. Without them it runs a forward to find them, and torch's own
            DDP then fails in the second step ("rebuilt parameter indices size is not same").
        dtype: Type of the batches.
    """

    def __init__(
        self,
        schedule: str,
        stages: Sequence[nn.Module],
        wrap: Wrap,
        micro_batches: int,
        on_groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        *,
        shapes: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from torch.distributed import pipelining

        pipeline, replicas = on_groups
        self.place, self.replica = dist.get_rank(pipeline), dist.get_rank(replicas)
        self.held = list(range(self.place, len(stages), 2))
        self.modules = [wrap(stages[index], replicas) for index in self.held]
        self.dtype = dtype

        def message(requires_grad: bool) -> torch.Tensor | None:
            shape = ROWS // micro_batches, WIDTH
            return torch.empty(shape, dtype=dtype, requires_grad=requires_grad) if shapes else None

        made = [
            pipelining.PipelineStage(
                module,
                index,
                len(stages),
                torch.device("cpu"),
                input_args=message(index > 0),
                output_args=message(True),
                group=pipeline,
            )
            for index, module in zip(self.held, self.modules, strict=True)
        ]
        kind: Any = getattr(pipelining, schedule)
        self.schedule = kind(made if len(made) > 1 else made[0], micro_batches, loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.SGD([p for module in self.modules for p in module.parameters()], lr=0.1)

    def step(self, number: int) -> None:
        """Train one step: forward, backward and the optimizer."""
        inputs, target = batch(self.replica, number, self.dtype)
        self.optimizer.zero_grad()
        if self.place == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=target)
        self.optimizer.step()

    def parameters(self) -> list[torch.Tensor]:
        """Return copies of the parameters of the rank's stages."""
        return [p.detach().clone() for module in self.modules for p in module.parameters()]


def batch(replica: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a replica's inputs and targets."""
    generator = torch.Generator().manual_seed(100 * replica + step)
    inputs, target = (torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    return inputs, target


def in_one_process(stages: Sequence[nn.Module], steps: int) -> list[nn.Module]:
    """Train all stages on the batches of both replicas, without a pipeline, and return them."""
    whole = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(steps):
        batches = [batch(replica, step, torch.float64) for replica in range(2)]
        optimizer.zero_grad()
        inputs, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
        nn.functional.mse_loss(whole(inputs), target).backward()
        optimizer.step()
    return list(stages)
