"""Layers that training leaves out at random, the same ones on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from typing_extensions import override

from ddpobs.errors import ConfigError


class LayerDrop(torch.nn.Sequential):
    """Layers each of which a training step leaves out with a given probability.

    A step without a layer computes neither its output nor its gradient. Every layer must return what the next one
    takes. While the module trains, iteration, a call and a slice leave the dropped layers out. `children()`, `len`, an
    index and `state_dict` include them, under the names of `Sequential` and `ModuleList`.

    `ddpobs.DistributedDataParallel` calls `draw` in each forward, with the number of its synchronised backward passes
    so far: batches that are accumulated under `no_sync` drop the same layers. Other training loops call it themselves.

    Args:
        layers: The layers.
        probability: Of a layer to be dropped in a step, 0 to below 1.
        seed: Of the draws. Choose another one for each LayerDrop of a model.

    Raises:
        ConfigError: The probability is out of range.

    Source: Fan, Grave and Joulin, Reducing Transformer Depth on Demand with Structured Dropout, ICLR 2020; between
    ranks as in section 6.2.2 of the paper on torch's DDP, VLDB 2020.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], probability: float, seed: int = 0) -> None:
        if not 0 <= probability < 1:
            raise ConfigError("probability", "0 to below 1", probability)
        super().__init__(*layers)
        self._probability, self._seed = probability, seed
        self._dropped: frozenset[int] = frozenset()

    @property
    def probability(self) -> float:
        """As given. It cannot change: the ranks compare it once, when the model is wrapped."""
        return self._probability

    @property
    def seed(self) -> int:
        """As given."""
        return self._seed

    def draw(self, step: int) -> None:
        """Drop the layers of a step from now on. The same step always has the same layers; step 0 drops none.

        The buckets take the order of the gradients from the first step.
        """
        self._dropped = self.dropped_in(step)

    def dropped_in(self, step: int) -> frozenset[int]:
        """Indices of the layers that a step drops."""
        if step == 0:
            return frozenset()
        numbers = random.Random(f"{self._seed} {step}")
        return frozenset(index for index in range(len(self)) if numbers.random() < self._probability)

    @override
    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._kept(slice(None)))

    @override
    def __getitem__(self, index: Any) -> Any:
        return torch.nn.Sequential(*self._kept(index)) if isinstance(index, slice) else super().__getitem__(index)

    def _kept(self, part: slice) -> list[torch.nn.Module]:
        dropped = self._dropped if self.training else ()
        return [
            layer
            for index, layer in list(enumerate(self._modules.values()))[part]
            if index not in dropped and layer is not None
        ]

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no draw yet."""
        return self.__dict__ | {"_dropped": frozenset()}
