"""Whether every rank built the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ddpobs.errors import ModelsDifferError

Facts = Mapping[str, Sequence[tuple[str, str]]]
"""By kind (settings, parameters, buffers), each one's name and what is said of it. Tensors may differ in name."""

SETTINGS = "settings"
_T = TypeVar("_T")


def check_same_everywhere(facts: Facts, of_rank_0: _T, group: dist.ProcessGroup, device: torch.device) -> _T:
    """Compare all ranks' models: one small all-reduce, and another look only where something differs.

    Args:
        facts: What must be the same.
        of_rank_0: What may differ, and every rank takes from rank 0; its `repr` tells whether it does.
        group: Every rank of it calls this.
        device: On which the group can reduce.

    Returns:
        Rank 0's `of_rank_0`.

    Raises:
        ModelsDifferError: The same on every rank, naming the first thing that differs.
    """
    if group.size() == 1:
        return of_rank_0
    compared = [[[name if kind == SETTINGS else "", said] for name, said in facts[kind]] for kind in facts]
    digest = hashlib.sha256(json.dumps([compared, repr(of_rank_0)]).encode()).digest()
    mine = int.from_bytes(digest[:7], "big")
    bounds = torch.tensor([mine, -mine], dtype=torch.int64, device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    if int(bounds[0]) == -int(bounds[1]):
        return of_rank_0
    everyone: list[tuple[Facts, _T]] = [(facts, of_rank_0)] * group.size()
    dist.all_gather_object(everyone, (facts, of_rank_0), group=group)
    if differs := difference([theirs for theirs, _ in everyone]):
        raise ModelsDifferError(differs)
    return everyone[0][1]


def parameters(
    names: Sequence[str], tensors: Sequence[torch.Tensor], expect_sparse: Iterable[bool]
) -> list[tuple[str, str]]:
    """What is said of parameters: shape, dtype, strides, and whether their gradients are sparse."""
    return [
        (name, f"{_said(p)} (strides {list(p.stride())}{', sparse gradients' * sparse})")
        for name, p, sparse in zip(names, tensors, expect_sparse, strict=True)
    ]


def buffers(named: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """What is said of buffers: shape and dtype."""
    return [(name, _said(buffer)) for name, buffer in named.items()]


def _said(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def difference(everyone: Sequence[Facts]) -> str:
    """In words, where the ranks' models differ first; `everyone` is by rank. Empty where they do not."""
    for kind in everyone[0]:
        if found := _difference(kind, [facts[kind] for facts in everyone]):
            return (
                f"the ranks built different models: {found}. Build it identically on every rank (a layer or an "
                "argument that depends on the rank or on the data is the usual cause)"
            )
    return ""


def _difference(kind: str, everyone: Sequence[Sequence[tuple[str, str]]]) -> str:
    for index, alike in enumerate(zip(*everyone, strict=False)):
        if len({said for _, said in alike}) > 1:
            if kind == SETTINGS:
                return _by_rank(alike[0][0], [said for _, said in alike])
            return _by_rank(f"{kind[:-1]} {index}", [f"{name} {said}" for name, said in alike])
    if len({len(facts) for facts in everyone}) > 1:
        return _by_rank("the model", [f"{len(facts)} {kind}" for facts in everyone])
    return ""


def _by_rank(what: str, said: Iterable[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(said):
        ranks.setdefault(text, []).append(str(rank))
    parts = [f"{text} on rank {', '.join(which)}" for text, which in ranks.items()]
    return f"{what} is {' but '.join(parts)}"
