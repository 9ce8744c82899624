"""Size of a forward's inputs, also of unusual ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpobs.recording.input_size import input_size
from ddpobs.steps.raw_step import NO_INPUT, InputSize


class Sizeless(torch.Tensor):
    """A tensor without any size."""

    def size(self, *_: Any) -> Any:
        raise RuntimeError("no size")

    dim = numel = size
    shape = property(size)


class Failing(dict[str, Any]):
    def values(self) -> Any:
        raise KeyError("broken")


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
TOKENS = torch.zeros(4, 7, dtype=torch.long)


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        ((TOKENS,), InputSize(4, 28, 7)),
        ((TOKENS, torch.zeros(4, 9, 2)), InputSize(4, 28 + 72, 9)),
        (({"ids": TOKENS, "mask": [TOKENS]}, "text", None), InputSize(4, 56, 7)),
        ((torch.tensor(1.0), TOKENS), InputSize(4, 29, 7)),
        ((torch.zeros(50),), InputSize(50, 50, 0)),
        ((torch.zeros(0, 5),), InputSize(0, 0, 5)),
        ((torch.nn.Parameter(torch.zeros(3, 2)),), InputSize(3, 6, 2)),
        (([torch.zeros(2, 3)] * 100,), InputSize(2, 0, 3)),
        ((), NO_INPUT),
        ((object(), ENDLESS), NO_INPUT),
        ((Failing(),), NO_INPUT),
        ((torch.zeros(2, 3).as_subclass(Sizeless),), NO_INPUT),
    ],
)
def test_tensors_are_measured_wherever_they_are(inputs: tuple[Any, ...], size: InputSize) -> None:
    assert input_size(*inputs) == size


def test_a_nested_tensor_counts_its_elements() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(5, 3)], layout=torch.jagged)
    assert input_size(nested).rows == 2
