"""Digits with Lightning, which starts its second rank itself. The argument is the folder of the checkpoints.

`COLLECTOR` turns telemetry on in code.
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
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def on_fit_start(self) -> None:
        if "COLLECTOR" in os.environ:
            from ddpobs import attach

            model: Any = self.trainer.strategy.model
            attach(model, telemetry=os.environ["COLLECTOR"])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.log("loss", cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=3,
    accumulate_grad_batches=2,
    callbacks=[ModelCheckpoint(sys.argv[1], monitor="loss")],
    logger=False,
    enable_progress_bar=False,
)
model = Digits()
trainer.fit(
    model,
    DataLoader(pictures(0, 192), batch_size=16, shuffle=True),
    DataLoader(Slow(1000, 64, seconds=0.8), batch_size=16),
)
report(trainer.global_rank, model)
