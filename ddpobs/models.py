"""Whether every rank built the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpobs.errors import ModelsDifferError

Facts = list[tuple[str, list[int], list[int], str]]
"""Name, shape, strides and dtype of each parameter."""


def check_same_everywhere(names: Sequence[str], parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Compare the parameters of all ranks: one small all-reduce, and another look only where they differ.

    Args:
        names: The parameters' names, which may differ.
        parameters: Compared by number, shape, strides and dtype.
        group: Every rank of it calls this.

    Raises:
        ModelsDifferError: The same on every rank, naming the first parameter that differs.
    """
    if group.size() == 1:
        return
    facts: Facts = [
        (name, list(p.shape), list(p.stride()), str(p.dtype).removeprefix("torch."))
        for name, p in zip(names, parameters, strict=True)
    ]
    digest = hashlib.sha256(json.dumps([fact[1:] for fact in facts]).encode()).digest()
    mine = int.from_bytes(digest[:7], "big")
    bounds = torch.tensor([mine, -mine], dtype=torch.int64, device=parameters[0].device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    if int(bounds[0]) == -int(bounds[1]):
        return
    everyone: list[Facts] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyone, facts, group=group)
    raise ModelsDifferError(difference(everyone))


def difference(everyone: Sequence[Facts]) -> str:
    """In words, where the ranks' parameters differ first; `everyone` is by rank."""
    counts = [len(facts) for facts in everyone]
    for index in range(min(counts)):
        said: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            name, shape, strides, dtype = facts[index]
            said.setdefault(f"{name} {shape} {dtype} (strides {strides})", []).append(rank)
        if len({text.split(" ", 1)[1] for text in said}) > 1:
            return _sentence(f"parameter {index}", said)
    said = {}
    for rank, count in enumerate(counts):
        said.setdefault(f"{count} parameters", []).append(rank)
    return _sentence("the model", said)


def _sentence(what: str, said: dict[str, list[int]]) -> str:
    parts = [f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in said.items()]
    return (
        f"the ranks built different models: {what} is {' but '.join(parts)}. Build it identically on every rank (a "
        "layer that depends on the rank or on the data is the usual cause)"
    )
