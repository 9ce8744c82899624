"""How NCCL connects the ranks of a side group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpobs.comm.side_groups import disable_communicator_split


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_side_groups_communicator_is_not_split_from_the_worlds(wrapped: bool) -> None:
    nccl = SimpleNamespace(options=SimpleNamespace(split_from=object()))
    backend = SimpleNamespace(wrapped_pg=nccl) if wrapped else nccl
    group: Any = SimpleNamespace(_get_backend=lambda _: backend)
    disable_communicator_split(group, torch.device("cuda"))
    assert nccl.options.split_from is None
