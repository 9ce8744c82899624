"""Operations of telemetry under a user's modes."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddpobs.torch_seam.modes import unseen


class Refusing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"unknown function {func}")


class RefusingOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"unknown operation {func}")


@unseen
def total(tensor: torch.Tensor) -> int:
    return int(tensor.sum()) + tensor.numel()


def test_modes_that_refuse_operations_are_not_asked() -> None:
    tensor = torch.ones(3)
    assert total(tensor) == 6
    for mode in (Refusing(), RefusingOperations()):  # type: ignore[no-untyped-call]
        with mode:
            assert total(tensor) == 6
