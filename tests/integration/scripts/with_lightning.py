"""Digits with Lightning, which starts its second rank itself.

`fsdp2` as the first argument shards the model by FSDP2. The last argument is the folder of the checkpoints. `COLLECTOR`
turns telemetry on in code.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning
import torch
from digest import report
from digits import Slow, network, pictures
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def on_fit_start(self) -> None:
        if "COLLECTOR" in os.environ:
            from ddpobs import attach

            model: Any = self.network if sharded else self.trainer.strategy.model
            attach(model, telemetry=os.environ["COLLECTOR"])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.log("loss", cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ShardedDigits(Digits):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.network:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.network, mesh=mesh)


sharded = "fsdp2" in sys.argv
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else "ddp",
    max_epochs=3,
    accumulate_grad_batches=2,
    callbacks=[ModelCheckpoint(sys.argv[-1], monitor="loss")],
    logger=False,
    enable_progress_bar=False,
)
model = ShardedDigits() if sharded else Digits()
trainer.fit(
    model,
    DataLoader(pictures(0, 192), batch_size=16, shuffle=True),
    DataLoader(Slow(1000, 64, seconds=0.8), batch_size=16),
)
report(trainer.global_rank, model)
