"""Refusal of batches that no process can have observed."""

from __future__ import annotations

from dataclasses import astuple
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddpobs.errors import WireError
from ddpobs.wire.columns import Columns, Range, ranges_of
from ddpobs.wire.facts import SettingFacts, check_event, check_facts
from ddpobs.wire.fields import PHASES, UNKNOWN, Ints
from ddpobs.wire.pulse import RANK_TEXT
from ddpobs.wire.rows import Comms, Spans, Steps
from ddpobs.wire.schema import VERSION, Anchor, Batch, Fingerprint, Peers

_MAX_HASHES, _MAX_CHARACTERS = 20_000, 2_000_000
"""Maximum number of names of a fingerprint, and of characters of its names.

The collector keeps 65 fingerprints of each module.
"""
_PHASES_NS = tuple(f"{phase}_ns" for phase in PHASES)


def check(batch: Batch) -> None:
    """Refuse a batch that no process can have observed.

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
    collective = UNKNOWN
    for index, peers in enumerate(batch.peers):
        _check_peers(f"peers[{index}]", peers, batch.world_size, collective)
        collective = peers.last_collective
    if batch.hello is not None:
        check_facts("hello.settings", batch.hello.settings, SettingFacts)
    if batch.pulse is not None and not all(map(RANK_TEXT.fullmatch, batch.pulse.processes)):
        raise WireError("pulse.processes", "ranks as keys", "another text")
    for index, event in enumerate(batch.events):
        check_event(f"events[{index}]", event)
    for index, sample in enumerate(batch.fingerprints):
        _check_fingerprint(f"fingerprints[{index}]", sample)


class _Bounds(NamedTuple):
    """Smallest and largest value of each column of a record; bounds of times are relative to the anchor."""

    least: Ints
    most: Ints
    is_time: npt.NDArray[np.bool_]

    @classmethod
    def from_record(cls, record: type[Columns]) -> _Bounds:
        least, most, is_time = zip(*map(astuple, record.ranges.values()), strict=True)
        return cls(np.array(least), np.array(most), np.array(is_time))

    def around(self, anchor: Anchor) -> tuple[Ints, Ints]:
        """Return the smallest and largest values for a batch with that anchor."""
        middle = self.is_time * anchor.monotonic_ns
        return self.least + middle, self.most + middle


_STEPS_BOUNDS, _SPANS_BOUNDS, _COMMS_BOUNDS = (
    _Bounds.from_record(Steps),
    _Bounds.from_record(Spans),
    _Bounds.from_record(Comms),
)
_PEERS_RANGES = ranges_of(Peers)
_PHASE_ROWS = slice(Steps.names.index(_PHASES_NS[0]), Steps.names.index(_PHASES_NS[-1]) + 1)


def _check_steps(steps: Steps, anchor: Anchor) -> None:
    _check_bounds("steps", steps, _STEPS_BOUNDS, anchor)
    step, wall_ns = steps.step, steps.end_ns - steps.start_ns
    _require("steps.step", step[1:] > step[:-1], "after the step before it", first=1)
    _require("steps.end_ns", wall_ns >= 0, "not before start_ns")
    phases_ns = steps.table[_PHASE_ROWS].sum(axis=0)
    _require("steps.other_ns", phases_ns == wall_ns, "phases that add up to end_ns - start_ns")


def _check_spans(spans: Spans, anchor: Anchor) -> None:
    _check_bounds("spans", spans, _SPANS_BOUNDS, anchor)
    launched, done = spans.launched_ns, spans.done_ns
    _require("spans.launched_ns", launched >= spans.ready_ns, "not before ready_ns")
    _require("spans.done_ns", done >= launched, "not before launched_ns")
    started = spans.started_ns <= done
    if not started.all():
        started |= spans.started_ns == UNKNOWN
    _require("spans.started_ns", started, f"not after done_ns, or {UNKNOWN} for unknown")


def _check_comms(comms: Comms, anchor: Anchor) -> None:
    _check_bounds("comms", comms, _COMMS_BOUNDS, anchor)
    _require("comms.done_ns", comms.done_ns >= comms.launched_ns, "not before launched_ns")


def _check_peers(field: str, peers: Peers, world_size: int, previous: int) -> None:
    if peers.first_collective <= previous:
        raise WireError(
            f"{field}.first_collective", f"after {previous}, the last one before it", peers.first_collective
        )
    if peers.last_collective < peers.first_collective:
        raise WireError(f"{field}.last_collective", "not before first_collective", peers.last_collective)
    rows = len(peers.rank)
    for name, limits in {**_PEERS_RANGES, "rank": Range(0, world_size - 1)}.items():
        column: Ints = getattr(peers, name)
        is_of_older_client = name == "moving_ns" and not len(column)
        if len(column) != rows and not is_of_older_client:
            raise WireError(f"{field}.{name}", f"{rows} values, as in the columns before it", len(column))
        _require_between(f"{field}.{name}", column, limits.least, limits.most)


def _check_fingerprint(field: str, sample: Fingerprint) -> None:
    names = len(sample.names) + len(sample.buffer_names)
    if names > _MAX_HASHES:
        raise WireError(f"{field}.names", f"at most {_MAX_HASHES} names of parameters and buffers", names)
    characters = sum(map(len, sample.names)) + sum(map(len, sample.buffer_names))
    if characters > _MAX_CHARACTERS:
        raise WireError(f"{field}.names", f"at most {_MAX_CHARACTERS} characters", characters)
    for name, count in (
        ("gradients", len(sample.names)),
        ("parameters", len(sample.names)),
        ("buffers", len(sample.buffer_names)),
    ):
        hashes: Ints = getattr(sample, name)
        if len(hashes) != count:
            raise WireError(f"{field}.{name}", f"{count} hashes, as many as names", len(hashes))


def _check_bounds(field: str, record: Columns, bounds: _Bounds, anchor: Anchor) -> None:
    if not len(record):
        return
    least, most = bounds.around(anchor)
    low, high = record.extremes
    is_beyond = (low < least) | (high > most)
    if not is_beyond.any():
        return
    # Times last: a wrong phase, which is the cause, may have made a time wrong.
    for index in sorted(np.flatnonzero(is_beyond), key=bounds.is_time.__getitem__):
        column, name = record.table[index], f"{field}.{record.names[index]}"
        if bounds.is_time[index]:
            near = (column >= least[index]) & (column <= most[index]) | (column == UNKNOWN)
            _require(name, near, "a time within 30 days of the anchor, on the same clock")
        else:
            _require_between(name, column, int(least[index]), int(most[index]))


def _require_between(field: str, column: Ints, least: int, most: int) -> None:
    is_valid = (column >= least) & (column <= most)
    if not is_valid.all():
        row = int(np.argmin(is_valid))
        raise WireError(field, f"{least} to {most}", f"{column[row]} in row {row}")


def _require(field: str, satisfied: npt.NDArray[np.bool_], expected: str, first: int = 0) -> None:
    """Refuse a column in a row that is not satisfied. `satisfied` begins with row `first`."""
    if not satisfied.all():
        raise WireError(field, expected, f"another value in row {first + int(np.argmin(satisfied))}")
