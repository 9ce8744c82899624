"""Rank 1 meets a new size in every tenth step from the 20th to the 80th, and compiles anew each time."""

from __future__ import annotations

import torch
import torch._dynamo.config as dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dynamo.automatic_dynamic_shapes = False


class Net(nn.Module):
    """Layers of which the compiler sees the size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the layers' output."""
        output: torch.Tensor = self.layers(batch)
        return output


def main() -> None:
    """Train for 100 steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    net.compile(backend="aot_eager", dynamic=False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100):
        size = 4 + (step // 10 if dist.get_rank() == 1 and 20 <= step < 90 else 0)
        optimizer.zero_grad()
        model(torch.ones(size, 16)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
