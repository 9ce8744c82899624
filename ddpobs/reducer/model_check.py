"""Whether every rank built the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ddpobs.errors import ModelsDifferError
from ddpobs.torch_seam.collectives import values_of_all

Facts = Mapping[str, Sequence[tuple[str, str]]]
"""By kind (settings, parameters, buffers), pairs of name and description. The names of tensors may differ."""

SETTINGS = "settings"
_T = TypeVar("_T")


def check_same_everywhere(facts: Facts, of_rank_0: _T, group: dist.ProcessGroup, device: torch.device) -> _T:
    """Compare all ranks' models. A collective call: a small all-gather, and a second one if there is a difference.

    Args:
        facts: Facts that must be the same on every rank.
        of_rank_0: A value that may differ, and that every rank takes from rank 0. Its `repr` is compared.
        group: The process group.
        device: A device on which the group can reduce.

    Returns:
        Rank 0's `of_rank_0`.

    Raises:
        ModelsDifferError: The facts differ. The same error on every rank, with the first difference.
    """
    if group.size() == 1:
        return of_rank_0
    compared = [[[name if kind == SETTINGS else "", fact] for name, fact in facts[kind]] for kind in facts]
    digest = hashlib.sha256(json.dumps([compared, repr(of_rank_0)]).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    numbers = torch.stack(values_of_all(group, torch.tensor(number, device=device))).tolist()
    if set(numbers) == {number}:
        return of_rank_0
    by_rank: list[tuple[Facts, _T]] = [(facts, of_rank_0)] * group.size()
    dist.all_gather_object(by_rank, (facts, of_rank_0), group=group)
    if message := difference([rank_facts for rank_facts, _ in by_rank]):
        raise ModelsDifferError(message)
    return by_rank[0][1]


def parameters(
    names: Sequence[str], tensors: Sequence[torch.Tensor], expect_sparse: Iterable[bool]
) -> list[tuple[str, str]]:
    """Facts of parameters: shape, dtype, strides, and whether the gradient is sparse."""
    return [
        (name, f"{_describe(p)} (strides {list(p.stride())}{', sparse gradients' * sparse})")
        for name, p, sparse in zip(names, tensors, expect_sparse, strict=True)
    ]


def buffers(named: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Facts of buffers: shape and dtype."""
    return [(name, _describe(buffer)) for name, buffer in named.items()]


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def difference(facts_by_rank: Sequence[Facts]) -> str:
    """A message about the first difference between the ranks' models; empty if there is none."""
    for kind in facts_by_rank[0]:
        if message := _difference(kind, [facts[kind] for facts in facts_by_rank]):
            return (
                f"the ranks built different models: {message}. Build it identically on every rank (a layer or an "
                "argument that depends on the rank or on the data is the usual cause)"
            )
    return ""


def _difference(kind: str, facts_by_rank: Sequence[Sequence[tuple[str, str]]]) -> str:
    for index, pairs in enumerate(zip(*facts_by_rank, strict=False)):
        if len({fact for _, fact in pairs}) > 1:
            if kind == SETTINGS:
                return _by_rank(pairs[0][0], [fact for _, fact in pairs])
            return _by_rank(f"{kind[:-1]} {index}", [f"{name} {fact}" for name, fact in pairs])
    if len({len(facts) for facts in facts_by_rank}) > 1:
        return _by_rank("the model", [f"{len(facts)} {kind}" for facts in facts_by_rank])
    return ""


def _by_rank(subject: str, facts: Iterable[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, fact in enumerate(facts):
        ranks.setdefault(fact, []).append(str(rank))
    parts = [f"{fact} on rank {', '.join(numbers)}" for fact, numbers in ranks.items()]
    return f"{subject} is {' but '.join(parts)}"
