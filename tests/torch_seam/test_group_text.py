"""Groups in words."""

from __future__ import annotations

import torch.distributed as dist

from ddpobs.torch_seam.collectives import group_text
from tests.support.distributed.launch import run_ranks


def texts(rank: int, world_size: int) -> list[str]:
    named, unnamed = dist.new_group([0, 1], group_desc="tensor"), dist.new_group([0, 1])
    groups = (dist.group.WORLD, named, unnamed)
    return [group_text(group) for group in groups if isinstance(group, dist.ProcessGroup)]


def test_a_group_is_named_by_its_description_else_by_its_name() -> None:
    for default, named, unnamed in run_ranks(texts, 2):
        assert (default, named) == ("the default group", "group tensor of 2 ranks")
        assert unnamed.startswith("group ")
        assert unnamed.endswith(" of 2 ranks")


def test_what_is_no_group_of_torchs_has_a_text_too() -> None:
    assert group_text(object()) == "a group"  # type: ignore[arg-type]
