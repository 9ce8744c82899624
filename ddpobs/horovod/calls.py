"""What the ranks must agree on before a collective, and the message about a difference.

The rules, and the first words of the messages, are those of Horovod's controller (`ConstructResponse`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

ANY_LENGTH = -1
"""Stands for a dimension in which the ranks may differ."""

Tensor = tuple[str, torch.dtype, tuple[int, ...], bool]
"""A tensor's name (empty without one), dtype, shape, and whether it is on a GPU."""


class Call(NamedTuple):
    """A collective as one rank calls it. Ranks that call it together have equal calls.

    Attributes:
        kind: The function, such as `allreduce`.
        name: The user's name for it.
        settings: Labels and values of the arguments.
        tensors: The tensors that take part.
    """

    kind: str
    name: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    tensors: tuple[Tensor, ...] = ()


def described(tensor: torch.Tensor, name: str = "") -> Tensor:
    """A tensor of which dtype and shape must be the same on every rank."""
    return name, tensor.dtype, tensor.shape, tensor.is_cuda


def described_rows(tensor: torch.Tensor) -> Tensor:
    """A tensor whose first dimension may differ between the ranks."""
    return "", tensor.dtype, (ANY_LENGTH, *tensor.shape[1:]), tensor.is_cuda


Facts = Mapping[str, Any]
"""A call that can be written as JSON."""


def facts_of(call: Call) -> Facts:
    """Return the call's texts."""
    return {
        "kind": call.kind,
        "name": call.name,
        "settings": [[label, _text_of(value)] for label, value in call.settings],
        "tensors": [_texts_of(tensor) for tensor in call.tensors],
    }


def digest(call: Call) -> str:
    """A short text that is the same for equal calls only."""
    return hashlib.sha256(json.dumps(facts_of(call)).encode()).hexdigest()[:16]


def _text_of(value: Any) -> str:
    return value.__qualname__ if isinstance(value, type) else str(value)


def _texts_of(tensor: Tensor) -> list[str]:
    name, dtype, shape, is_cuda = tensor
    lengths = ", ".join("any" if length == ANY_LENGTH else str(length) for length in shape)
    return [name, str(dtype).removeprefix("torch."), f"[{lengths}]", " on a GPU" * is_cuda]


def summary(facts: Facts) -> str:
    """A call in a few words, such as `allreduce 'loss' of float32[3]`."""
    name = f" {facts['name']!r}" if facts["name"] is not None else ""
    tensors = facts["tensors"]
    if not tensors:
        return f"{facts['kind']}{name}"
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{facts['kind']}{name} of {_joined(tensors[0])}{more}"


def _joined(texts: Sequence[str]) -> str:
    name, dtype, shape, device = texts
    return f"{name} {dtype}{shape}{device}".strip()


def difference(facts_by_rank: Mapping[int, Facts]) -> str:
    """A message about the first difference between the ranks' calls; empty if there is none."""
    every = list(facts_by_rank.values())
    kinds = {(facts["kind"], facts["name"]) for facts in every}
    if len(kinds) > 1:
        calls = by_rank({rank: summary(facts) for rank, facts in facts_by_rank.items()})
        return f"Mismatched operations: {calls}. Call the same collectives in the same order on every rank"
    subject = summary({**every[0], "tensors": []})
    for what, values, advice in _compared(facts_by_rank):
        if len(set(values.values())) > 1:
            return f"{what} in {subject}: {by_rank(values)}. {advice}"
    return ""


def _compared(facts_by_rank: Mapping[int, Facts]) -> Iterable[tuple[str, Mapping[int, str], str]]:
    """What is compared, in Horovod's order; its value on each rank, and the advice if the ranks differ."""
    every = list(facts_by_rank.values())
    kind, same = every[0]["kind"], "Pass the same value on every rank"
    counts = {rank: f"{len(facts['tensors'])} tensors" for rank, facts in facts_by_rank.items()}
    columns = [
        {rank: facts["tensors"][index] for rank, facts in facts_by_rank.items()}
        for index in range(min(len(facts["tensors"]) for facts in every))
    ]
    advice = "Give it tensors of the same dtype, shape and device on every rank, in the same order"
    for what, part in (
        ("Mismatched names", 0),
        ("Mismatched data types", 1),
        (f"Mismatched {kind} tensor shapes", 2),
        (f"Mismatched {kind} CPU/GPU device selection", 3),
    ):
        for column in columns:
            if len({texts[part] for texts in column.values()}) > 1:
                yield what, {rank: _joined(texts) for rank, texts in column.items()}, advice
    yield f"Mismatched {kind} numbers of tensors", counts, advice
    for index, (label, _) in enumerate(every[0]["settings"]):
        values = {rank: facts["settings"][index][1] for rank, facts in facts_by_rank.items()}
        yield _PHRASES.get(label, "Mismatched {label}").format(kind=kind, label=label), values, same


_PHRASES = {
    "op": "Mismatched reduction operation",
    "root_rank": "Mismatched {kind} root ranks",
    "factors": "Mismatched prescale and/or postscale factors",
}
"""Horovod's words by label."""


def by_rank(values: Mapping[int, str]) -> str:
    """Values with their ranks: `rank 0: float32[3], ranks 1, 2: int32[3]`."""
    ranks: dict[str, list[str]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(f"rank{'s' * (len(of) > 1)} {', '.join(of)}: {value}" for value, of in ranks.items())
