"""Columns of steps and bucket spans in answers: null for unknown values, and a type for each column."""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import TypedDict

from ddpobs import wire
from ddpobs.wire.columns import Columns, Range
from ddpobs_server.analysis.steps.step_bins import SHOWN

_ALIGNED = ("aligned_ready_ns", "aligned_launched_ns", "aligned_done_ns")
_STARTED = "started_ns"
_OWN, _OWN_PARTS = "own_ns", tuple(f"own_{phase}_ns" for phase in wire.OWN_PHASES)


def with_null(columns: dict[str, wire.Ints], record: type[Columns]) -> dict[str, wire.Ints]:
    """Mask unknown values, so that JSON has null for them.

    Args:
        columns: Columns of the record by name, and other columns.
        record: Declares the values of its columns.
    """
    masks = {
        name: columns[name] == wire.UNKNOWN for name, values in record.ranges.items() if _may_be_unknown(name, values)
    }
    masks |= {name: masks[_OWN] for name in _OWN_PARTS if name in record.ranges}  # A difference may be -1.
    return columns | {name: np.ma.masked_array(columns[name], mask) for name, mask in masks.items() if mask.any()}


def _may_be_unknown(name: str, values: Range) -> bool:
    return values.least == wire.UNKNOWN or name == _STARTED


def _type_of(name: str, values: Range) -> Any:
    return list[int | None] if _may_be_unknown(name, values) or name in _OWN_PARTS else list[int]


def _types_of(record: type[Columns]) -> dict[str, Any]:
    return {name: _type_of(name, values) for name, values in record.ranges.items()}


StepColumns = TypedDict(  # type: ignore[misc]
    "StepColumns",
    dict.fromkeys((*SHOWN, "ranks", "wall_ns"), list[int]) | _types_of(wire.Steps),
    total=False,
)
"""Columns of one row per step and rank, per bin or per step, as `mean` and `points` select; others are left out."""

SpanColumns = TypedDict(  # type: ignore[misc]
    "SpanColumns", {"rank": list[int]} | _types_of(wire.Spans) | dict.fromkeys(_ALIGNED, list[int])
)
"""Columns of one row per bucket span."""
