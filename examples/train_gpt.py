"""Train a small GPT on the source of the Python standard library, with one rank slowed down on request.

    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 100 [--fsdp]

The slowness is real work in one of the phases, on one rank. Telemetry does not receive its number.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpobs import DistributedDataParallel

CONTEXT, WIDTH, LAYERS, HEADS = 64, 96, 3, 4


class Bytes(Dataset[torch.Tensor]):
    """Windows of `CONTEXT + 1` bytes of the standard library's top-level modules."""

    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(path.read_bytes() for path in sources)
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index * CONTEXT : (index + 1) * CONTEXT + 1]


class Gpt(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        x = self.blocks(x, mask=self.mask, is_causal=True)
        return self.head(x.flatten(0, 1))  # type: ignore[no-any-return]


def work(rounds: int) -> None:
    """Multiply matrices, as a heavier sample, layer or optimizer would."""
    matrix = torch.randn(160, 160)
    for _ in range(rounds):
        matrix = torch.tanh(matrix @ matrix)


class HeavyBackward(torch.autograd.Function):
    """Passes values and gradients through; its backward does extra work, as recomputation would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounds: int) -> torch.Tensor:
        ctx.rounds = rounds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        work(ctx.rounds)
        return gradients[0], None


def sharded(model: Gpt) -> nn.Module:
    """Shard the model by FSDP2, each block a unit."""
    from torch.distributed.fsdp import fully_shard  # It takes long to import.

    from ddpobs import attach

    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model)
    attach(model, telemetry=None)
    return model


def main() -> None:
    """Train, and print the progress from rank 0."""
    options = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = sharded(Gpt()) if options.fsdp else DistributedDataParallel(Gpt(), bucket_cap_mb=0.4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Bytes()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, seed=1)
    rounds = {
        phase: options.work if rank == options.slow_rank and phase == options.slow_phase else 0 for phase in _PHASES
    }

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        work(rounds["data"])
        return torch.stack(samples)

    loader = DataLoader(data, batch_size=options.batch, sampler=sampler, collate_fn=collate)
    optimizer.register_step_pre_hook(lambda *_: work(rounds["optimizer"]))
    began, step, epoch = time.monotonic(), 0, 0
    while step < options.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            if step == options.steps:
                break
            optimizer.zero_grad()
            logits = model(batch[:, :-1])
            work(rounds["forward"])
            logits = HeavyBackward.apply(logits, rounds["backward"])  # type: ignore[no-untyped-call]
            loss = cross_entropy(logits, batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and (step % 20 == 0 or step == 1):
                rate = step / (time.monotonic() - began)
                print(
                    f"step {step:4d}/{options.steps}  loss {loss.item():.3f}  {rate:.1f} steps/s  {ranks} ranks",
                    flush=True,
                )
    dist.destroy_process_group()


_PHASES = ("data", "forward", "backward", "optimizer")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--fsdp", action="store_true", help="shard the model by FSDP2 instead of DDP")
    parser.add_argument("--slow-rank", type=int, default=int(os.environ.get("SLOW_RANK", "-1")))
    parser.add_argument("--slow-phase", choices=_PHASES, default=os.environ.get("SLOW_PHASE", "backward"))
    parser.add_argument("--work", type=int, default=200, help="additional matrix products on the slow rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
