"""The models of the benchmarks: modules, a batch for each, and a loss in which every parameter takes part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        title: Its name in tables.
        build: Makes the module, with the current seed.
        batch: Makes the module's positional arguments.
        outputs: Returns the tensors of the module's result that enter the loss.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    outputs: Callable[[Any], list[torch.Tensor]]

    def size_bytes(self) -> int:
        """Return the size of the parameters without allocating them. Also imports the module's requirements."""
        with torch.device("meta"):
            return sum(parameter.numel() * parameter.element_size() for parameter in self.build().parameters())

    def loss(self, result: Any) -> torch.Tensor:
        """Return the mean squares of the outputs, which stay finite for any number of steps."""
        return torch.stack([output.pow(2).mean() for output in self.outputs(result)]).sum()


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def _resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(id2label={index: str(index) for index in range(1000)}))


def _bert_base() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


def _itself(result: torch.Tensor) -> list[torch.Tensor]:
    return [result]


MODELS: dict[str, Model] = {
    "tiny": Model(
        "400 tiny parameters",
        lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(200))),
        lambda: (torch.randn(8, 16),),
        _itself,
    ),
    "wide": Model(
        "wide MLP, 12.6 M",
        lambda: nn.Sequential(*(nn.Linear(1448, 1448) for _ in range(6))),
        lambda: (torch.randn(32, 1448),),
        _itself,
    ),
    "transformer": Model(
        "transformer, 3.2 M",
        _transformer,
        lambda: (torch.randn(4, 64, 256),),
        _itself,
    ),
    "resnet50": Model(
        "ResNet-50, 25.6 M",
        _resnet50,
        lambda: (torch.randn(4, 3, 64, 64),),
        lambda result: [result.logits],
    ),
    "bert": Model(
        "BERT-base, 109 M",
        _bert_base,
        lambda: (torch.randint(0, 30_000, (2, 32)),),
        lambda result: [result.last_hidden_state, result.pooler_output],
    ),
}
"""ResNet-50 and BERT-base have the shapes of Transformers' default configurations. Nothing is downloaded."""
