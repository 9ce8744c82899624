"""Digits with a plain training loop, which lacks `sampler.set_epoch(epoch)`.

With `ours` as an argument it uses our DDP.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from digest import report
from digits import network, pictures
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

if "ours" in sys.argv:
    from ddpobs import DistributedDataParallel
else:
    from torch.nn.parallel import DistributedDataParallel  # type: ignore[assignment]

dist.init_process_group("gloo")
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
dataset = pictures(0, 192)
loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset), num_workers=1)
for _ in range(3):
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
report(dist.get_rank(), model)
dist.destroy_process_group()
