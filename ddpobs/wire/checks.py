"""What no process can have seen is refused."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddpobs.errors import WireError
from ddpobs.wire.columns import Columns
from ddpobs.wire.schema import (
    COMM_KINDS,
    OWN_PHASES,
    PHASES,
    UNKNOWN,
    VERSION,
    Anchor,
    Batch,
    Comms,
    Ints,
    Peers,
    Spans,
    Steps,
)

LONGEST_NS = 30 * 86_400 * 10**9
"""Nothing lasts longer, and a batch tells of no time further from its anchor than this."""
_PHASES_NS = tuple(f"{phase}_ns" for phase in PHASES)
_OWN_NS = tuple(f"own_{phase}_ns" for phase in OWN_PHASES)
_STRAGGLER = tuple(f"straggler_{phase}" for phase in OWN_PHASES)
_MOST = 2**48
_MOST_INDEX = 2**20 - 1


def check(batch: Batch) -> None:
    """Refuse what no process can have seen.

    Raises:
        WireError: Times out of order, phases that do not add up, a rank outside the world.
    """
    if batch.version > VERSION:
        raise WireError("version", f"at most {VERSION}; upgrade the collector", batch.version)
    if batch.rank >= batch.world_size:
        raise WireError("rank", f"below world_size {batch.world_size}", batch.rank)
    if batch.steps is not None:
        _check_steps(batch.steps, batch.anchor)
    if batch.spans is not None:
        _check_spans(batch.spans, batch.anchor)
    if batch.comms is not None:
        _check_comms(batch.comms, batch.anchor)
    for index, peers in enumerate(batch.peers):
        _check_peers(f"peers[{index}]", peers, batch.world_size)


class _Bounds(NamedTuple):
    """The least and the most of each column of a record; those of times lie around the anchor's."""

    least: Ints
    most: Ints
    of_time: npt.NDArray[np.bool_]

    def around(self, anchor: Anchor) -> tuple[Ints, Ints]:
        """What holds for a batch with that anchor."""
        middle = self.of_time * anchor.monotonic_ns
        return self.least + middle, self.most + middle


def _bounds(kind: type[Columns], /, **ranges: tuple[int, int]) -> _Bounds:
    """Columns without a range are times."""
    least, most = np.array([ranges.get(name, (-LONGEST_NS, LONGEST_NS)) for name in kind.names]).T
    return _Bounds(least, most, np.array([name not in ranges for name in kind.names]))


_COUNTED, _KNOWN, _LASTING = (0, _MOST), (UNKNOWN, _MOST), (0, LONGEST_NS)
_OWN = (-LONGEST_NS, LONGEST_NS)
_STEPS_BOUNDS = _bounds(
    Steps,
    collective=_KNOWN,
    own_ns=(UNKNOWN, LONGEST_NS),
    comm_ns=(UNKNOWN, LONGEST_NS),
    **dict.fromkeys(("step", "micro_steps", "samples", "flags"), _COUNTED),
    **dict.fromkeys(_PHASES_NS, _LASTING),
    **dict.fromkeys(_OWN_NS, _OWN),
)
_SPANS_BOUNDS = _bounds(
    Spans,
    step=_COUNTED,
    revision=_COUNTED,
    module=(0, _MOST_INDEX),
    bucket=(0, _MOST_INDEX),
    launched_ns=(-(2**63), 2**63 - 1),  # It is checked to lie between two times.
)
_COMMS_BOUNDS = _bounds(Comms, step=_COUNTED, module=(0, _MOST_INDEX), kind=(0, len(COMM_KINDS) - 1))
_PEERS_BOUNDS = {
    **dict.fromkeys(("own_ns", "delay_ns", "wait_ns", *_OWN_NS), _OWN),
    **dict.fromkeys(_STRAGGLER, _COUNTED),
}
_PHASE_ROWS = slice(Steps.names.index(_PHASES_NS[0]), Steps.names.index(_PHASES_NS[-1]) + 1)


def _check_steps(steps: Steps, anchor: Anchor) -> None:
    _check_bounds("steps", steps, _STEPS_BOUNDS, anchor)
    _require("steps.end_ns", steps.end_ns >= steps.start_ns, "not before start_ns")
    phases_ns = steps.table[_PHASE_ROWS].sum(axis=0)
    _require("steps.other_ns", phases_ns == steps.end_ns - steps.start_ns, "phases that add up to end_ns - start_ns")


def _check_spans(spans: Spans, anchor: Anchor) -> None:
    _check_bounds("spans", spans, _SPANS_BOUNDS, anchor)
    launched, done = spans.launched_ns, spans.done_ns
    _require("spans.launched_ns", launched >= spans.ready_ns, "not before ready_ns")
    _require("spans.done_ns", done >= launched, "not before launched_ns")
    started = (spans.started_ns <= done) | (spans.started_ns == UNKNOWN)
    _require("spans.started_ns", started, f"not after done_ns, or {UNKNOWN} for unknown")


def _check_comms(comms: Comms, anchor: Anchor) -> None:
    _check_bounds("comms", comms, _COMMS_BOUNDS, anchor)
    _require("comms.done_ns", comms.done_ns >= comms.launched_ns, "not before launched_ns")


def _check_peers(field: str, peers: Peers, world_size: int) -> None:
    rows = len(peers.rank)
    for name, (least, most) in {"rank": (0, world_size - 1), **_PEERS_BOUNDS}.items():
        column: Ints = getattr(peers, name)
        if len(column) != rows:
            raise WireError(f"{field}.{name}", f"{rows} values, as in the columns before it", len(column))
        _require_between(f"{field}.{name}", column, least, most)


def _check_bounds(field: str, record: Columns, bounds: _Bounds, anchor: Anchor) -> None:
    if not len(record):
        return
    least, most = bounds.around(anchor)
    low, high = record.table.min(axis=1), record.table.max(axis=1)
    beyond = np.flatnonzero((low < least) | (high > most))
    for place in sorted(beyond, key=bounds.of_time.__getitem__):  # What a wrong phase makes of a time, comes after it.
        column, name = record.table[place], f"{field}.{record.names[place]}"
        if bounds.of_time[place]:  # One that is unknown is at no time.
            near = (column >= least[place]) & (column <= most[place]) | (column == UNKNOWN)
            _require(name, near, "a time within 30 days of the anchor, on the same clock")
        else:
            _require_between(name, column, int(least[place]), int(most[place]))


def _require_between(field: str, column: Ints, least: int, most: int) -> None:
    within = (column >= least) & (column <= most)
    if not within.all():
        row = int(np.argmin(within))
        raise WireError(field, f"{least} to {most}", f"{column[row]} in row {row}")


def _require(field: str, holds: npt.NDArray[np.bool_], expected: str) -> None:
    if not holds.all():
        raise WireError(field, expected, f"another value in row {int(np.argmin(holds))}")
