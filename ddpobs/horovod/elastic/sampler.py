"""A sampler that goes on behind the samples that were processed, with any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import cycle, islice
from random import Random
from typing import Any

from torch.utils.data import Sampler

from ddpobs.horovod.position import rank, size


class ElasticSampler(Sampler[int]):
    """Divides a dataset among the ranks, without the samples that this epoch has processed already.

    Put it into the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    Args:
        dataset: A dataset of constant length.
        shuffle: Whether each epoch has another order.
        seed: Of the order; the same on every rank.

    Attributes:
        epoch: Number of the epoch.
        processed_num: Samples that all ranks together have processed in this epoch.
        num_replicas: Number of ranks.
        rank: This rank.
        remaining_indices: The epoch's samples that are not processed, in order, those of all ranks.
        num_samples: Samples of this rank; the first of `remaining_indices` fill up the last ranks' shares.
        total_size: Samples of all ranks, those that fill up included.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, in which no sample is processed; to be called at the end of an epoch."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch as processed, on this rank and on all others.

        Args:
            batch_idx: No effect.
            batch_size: Samples of one rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in another state, with the ranks that there are now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        filled = islice(cycle(self.remaining_indices), self.total_size)
        return iter(list(filled)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
