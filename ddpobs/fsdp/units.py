"""The units of a model as a layout: a row for each collective of each unit, in the order of their launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddpobs import wire
from ddpobs.torch_seam import fully_shard

GATHER, GATHER_AGAIN, SCATTER, REDUCE = wire.UNIT_KINDS[:4]
"""All-gather in forward and in backward, reduce-scatter, and the all-reduce over replicas."""
ROOT = "(root)"
"""Name of the unit of parameters that belong to no inner unit."""


class UnitLayout:
    """Rows of the collectives of a model's units.

    Forward gathers the units one after the other. Backward goes the other way, and gathers a unit before it reduces the
    one after it.

    Args:
        units: The units, in the order of forward.

    Attributes:
        rows: By unit, the index of the row by the collective's kind.
        buckets: The rows for the wire.
    """

    def __init__(self, units: Sequence[Any]) -> None:
        order = [(index, GATHER) for index, unit in enumerate(units) if fully_shard.shards(unit)]
        for index in reversed(range(-1, len(units))):
            if index >= 0 and fully_shard.shards(units[index]) and fully_shard.reshards(units[index]):
                order.append((index, GATHER_AGAIN))
            if index + 1 < len(units):
                order += [(index + 1, kind) for kind in _reductions(units[index + 1])]
        self.rows: list[dict[str, int]] = [{} for _ in units]
        for row, (index, kind) in enumerate(order):
            self.rows[index][kind] = row
        self.buckets = [_describe(units[index], kind) for index, kind in order]


def _reductions(unit: Any) -> list[str]:
    kinds = [SCATTER] if fully_shard.shards(unit) else []
    return kinds if fully_shard.replicate_group(unit) is None else [*kinds, REDUCE]


def _describe(unit: Any, kind: str) -> wire.Bucket:
    gathers = kind in {GATHER, GATHER_AGAIN}
    parameters = [
        parameter for parameter in fully_shard.parameters_of(unit) if gathers or parameter.reduced is not None
    ]
    types = [parameter.gathered if gathers else parameter.reduced or parameter.gathered for parameter in parameters]
    size_bytes = sum(parameter.size * dtype.itemsize for parameter, dtype in zip(parameters, types, strict=True))
    group = fully_shard.shard_group(unit)
    if kind == REDUCE and group is not None:
        size_bytes //= group.size()
    return wire.Bucket(
        size_bytes=size_bytes,
        dtype=_dtype(types),
        parameters=[wire.Parameter(name=parameter.name, size=parameter.size) for parameter in parameters],
        kind=kind,
        unit=fully_shard.name_of(unit) or ROOT,
    )


def _dtype(types: Sequence[torch.dtype]) -> str:
    """The type of a collective; torch gathers parameters of several types as bytes."""
    distinct = {str(dtype).removeprefix("torch.") for dtype in types}
    return distinct.pop() if len(distinct) == 1 else "uint8"
