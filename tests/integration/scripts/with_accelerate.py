"""Digits with Accelerate: accumulation over two batches, an evaluation and a checkpoint after each epoch.

With `dispatch` as the first argument, rank 0 reads the data for all ranks; with `shard`, each rank reads its own. With
`fsdp2` each does too, and FSDP2 shards the model. The second argument is the folder of the checkpoints. `COLLECTOR`
turns telemetry on in code.
"""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from digest import report
from digits import Slow, network, pictures
from sharding import choose_by_plugin
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

distribution, folder = sys.argv[1:]
set_seed(1)
plugin = None
if distribution == "fsdp2":
    choose_by_plugin()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=500)
accelerator = Accelerator(
    cpu=True,
    fsdp_plugin=plugin,
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(dispatch_batches=distribution == "dispatch"),
)
model = network()
model, optimizer, training, evaluation = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    DataLoader(pictures(0, 192), batch_size=16, shuffle=True),
    DataLoader(Slow(1000, 64, seconds=0.8), batch_size=16),
)
if "COLLECTOR" in os.environ:
    from ddpobs import attach

    attach(model, telemetry=os.environ["COLLECTOR"])
for epoch in range(3):
    model.train()
    for images, labels in training:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in evaluation:
            answers = accelerator.gather_for_metrics(model(images).argmax(1) == labels)
            correct += int(answers.sum())
    accelerator.print(f"{correct} of 64 correct")
    accelerator.save_state(f"{folder}/{epoch}")
report(accelerator.process_index, model)
accelerator.end_training()
