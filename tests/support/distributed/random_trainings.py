"""Random trainings, the same from the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.distributed.compare import grad

SEEDS = (*range(24), 113, 146)
"""Includes 113, in which bfloat16 gradients were partly in a bucket, and 146, in which a script replaced gradients."""
WIDTH = 8


class RandomModel(nn.Module):
    """A sequence of random blocks. One part may be skipped on some ranks in some steps, another part always."""

    def __init__(self, draw: random.Random, leaves_out: bool) -> None:
        super().__init__()
        self.kinds = draw.choices(("linear", "norm", "batch norm", "checkpoint", "frozen", "half", "strided"), k=3)
        self.blocks = nn.ModuleList(map(build_block, self.kinds))
        self.rows = nn.Embedding(7, WIDTH, sparse=draw.random() < 0.5)
        self.wide = nn.Linear(WIDTH, WIDTH).double()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.head = nn.Linear(WIDTH, 3)
        if draw.random() < 0.3:
            self.tied = nn.Linear(WIDTH, 3)
            self.tied.weight = self.head.weight
        if leaves_out:
            self.never, self.sometimes = nn.Linear(2, 3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, rank: int, step: int) -> dict[str, torch.Tensor]:
        x = x + self.rows(torch.tensor([rank, step, 5, 5]))
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            if kind == "checkpoint":
                x = checkpoint(block, x, use_reentrant=False)
            elif kind == "half":
                x = block(x.bfloat16()).float()
            else:
                x = block(x).tanh()
        x = self.wide(x.double()).float() * self.scale
        if hasattr(self, "sometimes") and (rank + step) % 2:
            x = x + self.sometimes(x)
        y = self.head(x)
        return {"y": y + self.tied(x) if hasattr(self, "tied") else y}


def build_block(kind: str) -> nn.Module:
    if kind == "norm":
        return nn.LayerNorm(WIDTH)
    if kind == "batch norm":
        return nn.BatchNorm1d(WIDTH)
    block = nn.Linear(WIDTH, WIDTH)
    if kind == "strided":
        block.weight = nn.Parameter(block.weight.detach().t().contiguous().t())
    return block.requires_grad_(kind != "frozen").to(torch.bfloat16 if kind == "half" else torch.float32)


class Training:
    """A random training, determined by a seed: it runs the same steps on both kinds of DDP."""

    def __init__(self, seed: int, rank: int, kind: Any) -> None:
        self.draw, self.rank, self.step = random.Random(seed), rank, 0
        torch.manual_seed(seed)
        # Torch rebuilds a static graph's buckets a step later, and a sum of more than two terms depends on the cut.
        static = self.draw.random() < 0.25 and dist.get_world_size() == 2
        leaves_out = not static and self.draw.random() < 0.5
        self.ddp = kind(
            RandomModel(self.draw, leaves_out),
            bucket_cap_mb=self.draw.choice((25, 0.002, 0.0005, 0.0001)),
            gradient_as_bucket_view=self.draw.random() < 0.5,
            static_graph=static,
            find_unused_parameters=leaves_out or (not static and self.draw.random() < 0.5),
        )
        self.always_syncs = static  # Torch refuses to begin a static graph's training under `no_sync`.
        self.parameters = [p for p in self.ddp.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05)
        self.kept_gradients: list[torch.Tensor] = []

    def results(self) -> list[Any]:
        """Return parameters, gradients and buffers after each step, and the kept gradients at the end."""
        tensors: list[Any] = []
        for step in range(self.draw.randint(2, 5)):
            self.step = step
            if self.draw.random() < 0.85:
                self.optimizer.zero_grad(set_to_none=self.draw.random() < 0.6)
            prepare, finish = self.draw.choice(BEFORE), self.draw.choice(AFTER)
            prepare(self)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.draw.random() < 0.1):
                loss = self.loss()
            (loss * self.draw.choice((1, 1, 1, 0))).backward()
            finish(self)
            tensors += [None if p.grad is None else p.grad.to_dense().clone() for p in self.parameters]
            self.optimizer.step()
            tensors += [tensor.detach().clone() for tensor in self.ddp.state_dict().values()]
        return tensors + [gradient.detach().clone() for gradient in self.kept_gradients]

    def loss(self, model: Any = None, salt: int = 0) -> torch.Tensor:
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * self.rank + 10 * self.step + salt))
        outputs: torch.Tensor = (model or self.ddp)(inputs, self.rank, self.step)["y"]
        return outputs.float().pow(2).mean()

    def dense_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield parameters with a dense gradient."""
        return (p for p in self.parameters if p.grad is not None and not p.grad.is_sparse)

    # ------------------------------------------------------------------ actions before a backward

    def do_nothing(self) -> None:
        pass

    def accumulate(self) -> None:
        for salt in range(0 if self.always_syncs else self.draw.randint(1, 2)):
            with self.ddp.no_sync():
                self.loss(salt=1 + salt).backward()

    def evaluate(self) -> None:
        self.ddp.eval()
        with torch.no_grad():
            self.loss(salt=3)
        self.ddp.train()

    def run_wrapped_module(self) -> None:
        """Run a backward of the wrapped module itself: its gradients are local until they are reduced."""
        if not self.always_syncs:
            self.loss(self.ddp.module, salt=4).backward()

    def run_forward_only(self) -> None:
        self.loss(salt=5)

    def replace_gradients(self) -> None:
        for parameter in self.dense_parameters():
            parameter.grad = 2 * grad(parameter).clone()

    def load_state(self) -> None:
        self.ddp.load_state_dict({name: tensor.clone() for name, tensor in self.ddp.state_dict().items()})

    # ------------------------------------------------------------------ actions after it

    def clip(self) -> None:
        for parameter in self.dense_parameters():
            grad(parameter).clamp_(-0.01, 0.01)

    def detach(self) -> None:
        for parameter in self.dense_parameters():
            parameter.grad = grad(parameter).detach().clone()

    def clear_some(self) -> None:
        for parameter in self.parameters[::2]:
            parameter.grad = None

    def keep(self) -> None:
        """Keep the gradients, unless they are views, which the next step overwrites (`gradient_as_bucket_view`)."""
        if not self.ddp.gradient_as_bucket_view:
            self.kept_gradients += [p.grad for p in self.dense_parameters() if p.grad is not None]


Action = Callable[[Training], None]
BEFORE: tuple[Action, ...] = (
    Training.do_nothing,
    Training.accumulate,
    Training.evaluate,
    Training.run_wrapped_module,
    Training.run_forward_only,
    Training.replace_gradients,
    Training.load_state,
)
AFTER: tuple[Action, ...] = (
    Training.do_nothing,
    Training.clip,
    Training.detach,
    Training.clear_some,
    Training.keep,
)
