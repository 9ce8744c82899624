"""A script written for Horovod, with only its import changed: an MLP on scikit-learn's digits.

    ddpobs run -- torchrun --nproc-per-node 2 examples/train_horovod.py

Gradients add up over 4 backward passes, the learning rate grows with the number of ranks, and all ranks begin with rank
0's parameters.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpobs.horovod as hvd  # was: import horovod.torch as hvd

PASSES, TRAINING = 4, 1536


def main() -> None:
    """Train, and print the accuracy of each epoch."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--timeline", help="file for a Chrome trace")
    arguments, _ = options.parse_known_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    if arguments.timeline:
        hvd.start_timeline(arguments.timeline)

    training, test = digits()
    sampler: DistributedSampler[object] = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(training, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=PASSES
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader):
            if number % PASSES == 0:
                optimizer.zero_grad()
            loss = cross_entropy(model(images), labels) / PASSES
            loss.backward()
            if number % PASSES == PASSES - 1:
                optimizer.step()
        accuracy = hvd.allreduce(correct(model, test), name="accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: {accuracy.item():.1%} of the test digits correct, {hvd.size()} ranks")
    hvd.stop_timeline()


def correct(model: nn.Module, test: TensorDataset) -> torch.Tensor:
    """Return the share of a rank's test digits that the model reads correctly."""
    model.eval()
    images, labels = test[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        share: torch.Tensor = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return share


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1536 digits for training and 261 for the test: 8 x 8 pixels between 0 and 1, with labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("this example trains on scikit-learn's digits: pip install scikit-learn") from None
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 16
    labels = torch.tensor(bunch.target)
    return TensorDataset(images[:TRAINING], labels[:TRAINING]), TensorDataset(images[TRAINING:], labels[TRAINING:])


if __name__ == "__main__":
    main()
