"""Digits by Accelerate: accumulation over two batches, an evaluation and a checkpoint after each epoch.

The first argument says whether rank 0 reads for everyone (`dispatch`) or each rank for itself (`shard`); the second is
where checkpoints go.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from digits import Slow, network, pictures
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

how, folder = sys.argv[1:]
set_seed(1)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(dispatch_batches=how == "dispatch"),
)
model = network()
model, optimizer, training, evaluation = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    DataLoader(pictures(0, 192), batch_size=16, shuffle=True),
    DataLoader(Slow(1000, 64, seconds=0.8), batch_size=16),
)
for _ in range(3):
    model.train()
    for images, labels in training:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in evaluation:
            answers = accelerator.gather_for_metrics(model(images).argmax(1) == labels)
            right += int(answers.sum())
    accelerator.print(f"{right} of 64 right")
    accelerator.save_state(folder)
accelerator.end_training()
