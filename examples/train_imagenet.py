"""Training as on ImageNet: a ResNet on images of 224 x 224, here scikit-learn's digits in the place of photographs.

    ddpobs run -- torchrun --nproc-per-node 2 examples/train_imagenet.py

The digits are resized by the loader, sample by sample, as photographs are decoded. For real images replace `Digits` by
a data set of yours that returns a tensor [3, 224, 224] and a class.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpobs import DistributedDataParallel

TRAINING, CLASSES = 1536, 10
Sample = tuple[torch.Tensor, torch.Tensor]


class Digits(Dataset[Sample]):
    """Scikit-learn's digits between two indices, each resized to [3, size, size]."""

    def __init__(self, first: int, end: int, size: int) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise SystemExit("this example trains on scikit-learn's digits: pip install scikit-learn") from None
        bunch = load_digits()
        self.images = torch.tensor(bunch.images[first:end], dtype=torch.float32) / 16
        self.labels = torch.tensor(bunch.target[first:end])
        self.size = size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        image = interpolate(self.images[index].expand(1, 3, 8, 8), size=self.size, mode="bilinear")[0]
        return image, self.labels[index]


class Block(nn.Module):
    """A basic block of ResNet; from the second stage on it halves height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(width: int) -> nn.Module:
    """A ResNet with one block in each of four stages: a ResNet-10 if the first is 64 channels wide."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *(Block(inputs, outputs) for inputs, outputs in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], CLASSES),
    )


def correct(model: nn.Module, test: Digits) -> float:
    """Return the share of all ranks' test images whose class the model finds."""
    model.eval()
    own = range(dist.get_rank(), len(test), dist.get_world_size())
    images, labels = (torch.stack(parts) for parts in zip(*(test[index] for index in own), strict=True))
    with torch.no_grad():
        counts = torch.tensor([(model(images).argmax(1) == labels).sum().item(), len(own)])
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def main() -> None:
    """Train, and print the accuracy of each epoch."""
    arguments = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Digits(0, arguments.images, arguments.size)
    test = Digits(TRAINING, TRAINING + 64, arguments.size)
    sampler: DistributedSampler[Sample] = DistributedSampler(training)
    loader = DataLoader(training, arguments.batch, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(resnet(arguments.width), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        share = correct(model.module, test)
        if rank == 0:
            print(f"epoch {epoch + 1}: {share:.1%} of the test images correct, {ranks} ranks", flush=True)
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=TRAINING, help=f"of the training, at most {TRAINING}")
    parser.add_argument("--batch", type=int, default=16, help="images per rank and step")
    parser.add_argument("--size", type=int, default=224, help="height and width of an image")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    return parser.parse_args()


if __name__ == "__main__":
    main()
