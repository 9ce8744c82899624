"""The collectives of an engine as a layout. DeepSpeed has no list of them: each gets a row when it is first launched.

All ranks launch the same collectives in the same order, so their rows are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ddpobs import wire

GATHER, GATHER_AGAIN, SCATTER, REDUCE, GATHER_UPDATED, *_ = wire.UNIT_KINDS
MAX_ROWS = 4096
_MAX_REVISIONS = 64
"""Layouts after which rows are no longer added: in such a model the collectives differ from step to step."""
_UNITS = {"forward": "forward", "backward": "gradients", "optimizer": "optimizer"}
"""Names of collectives whose parameters are not known, by phase; a number follows."""


class Key(NamedTuple):
    """What identifies a collective within a pass.

    Attributes:
        phase: `forward`, `backward` or `optimizer`.
        kind: One of `wire.UNIT_KINDS`.
        dtype: Type of its elements.
        size_bytes: Size of what it gathers or reduces.
        ordinal: Number of the same ones before it in the pass.
    """

    phase: str
    kind: str
    dtype: str
    size_bytes: int
    ordinal: int


class Rows:
    """Rows of the layout, in the order in which they were first launched.

    Args:
        names: Name and position of each parameter, by its identity.

    Attributes:
        buckets: The rows for the wire.
        changed: They differ from the layout reported last.
    """

    def __init__(self, names: Mapping[int, tuple[int, str]]) -> None:
        self._names = names
        self._index: dict[Key, int] = {}
        self._members: dict[int, frozenset[int]] = {}
        """Identities of the parameters, by row."""
        self._numbers: dict[str, int] = {}
        self._revisions = 0
        self.buckets: list[wire.Bucket] = []
        self.changed = False

    def of(self, key: Key) -> int | None:
        """Return the index of a collective's row, which is added if it is new; None if there are too many."""
        index = self._index.get(key)
        if index is None and len(self.buckets) < MAX_ROWS and self._revisions < _MAX_REVISIONS:
            index = self._index[key] = len(self.buckets)
            number = self._numbers[key.phase] = self._numbers.get(key.phase, 0) + 1
            unit = f"{_UNITS[key.phase]}.{number}"
            self.buckets.append(
                wire.Bucket(size_bytes=key.size_bytes, dtype=key.dtype, parameters=[], kind=key.kind, unit=unit)
            )
            self.changed = True
        return index

    def is_named(self, row: int) -> bool:
        """Whether the row's parameters are known."""
        return row in self._members

    def name(self, row: int, parameters: Sequence[Any]) -> None:
        """Give a row the parameters that the collective gathers or reduces; their order does not matter."""
        members = frozenset(map(id, parameters))
        if self._members.get(row) == members or self._revisions >= _MAX_REVISIONS:
            return
        self._members[row] = members
        known = sorted((*self._names[id(each)], _size(each)) for each in parameters if id(each) in self._names)
        if known:
            names = [wire.Parameter(name=name, size=size) for _, name, size in known]
            self.buckets[row] = msgspec.structs.replace(self.buckets[row], parameters=names, unit=_unit(names))
            self.changed = True

    def reported(self) -> None:
        """Count the rows as reported."""
        self.changed = False
        self._revisions += 1


def _size(parameter: Any) -> int:
    """Elements of a parameter, which is empty while ZeRO-3 has divided it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _unit(parameters: Sequence[wire.Parameter]) -> str:
    """Name the modules of parameters: `blocks.3`, or `blocks.3 and 2 more`."""
    modules = list(dict.fromkeys(parameter.name.rpartition(".")[0] or "(root)" for parameter in parameters))
    return modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
