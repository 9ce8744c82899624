"""The collectives of a fully sharded model's units in its latest steps: when they were launched, done and waited for.

A collective moves bytes for the shortest of the ranks' times (see `transfers`). Times are compared on each rank's own
clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.shared.words import percent
from ddpobs_server.analysis.communication.processors import Shortage, shortage
from ddpobs_server.analysis.communication.step_replay import DISTURBED_SHARE, disturbed_share
from ddpobs_server.analysis.communication.transfers import Transfers, read_spans, transfers
from ddpobs_server.analysis.evidence import MIN_STEPS, ColumnReader, ColumnsTooLargeError, Evidence
from ddpobs_server.analysis.finding import Gain
from ddpobs_server.analysis.steps.joined_steps import Floats

GATHERS = wire.UNIT_KINDS[:2]
MIN_GAIN = 0.03
"""Minimum predicted saving, as a share of the step, that is reported."""
_REPEATED, _REPEATED_SHARE = "gather a unit several times", 0.1


@dataclass(frozen=True)
class UnitSteps:
    """Steps that have the same collectives on all examined ranks, in the order of their launch.

    Attributes:
        module: Number of the module.
        index: Row of the layout, shape [collectives].
        rows: The same as the layout has it.
        launched_ns: Shape [steps, collectives, ranks].
        done_ns: Same shape.
        waited_ns: Time that training waits for it, same shape.
        moving_ns: Time without waiting for the last rank, shape [steps, collectives].
        exposed_ns: Shortest wait of training over the ranks, with the queue for the link: the last rank to arrive waits
            for no other. Same shape.
        blocks: Whether a collective blocks the thread that launches it, as on a CPU, shape [collectives].
        step_ns: Typical step.
    """

    module: int
    index: wire.Ints
    rows: list[wire.Bucket]
    launched_ns: wire.Ints
    done_ns: wire.Ints
    waited_ns: wire.Ints
    moving_ns: Floats
    exposed_ns: Floats
    blocks: npt.NDArray[np.bool_]
    step_ns: float

    def gain(self, saved_ns: Floats) -> Gain | None:
        """Return the gain of a change.

        Args:
            saved_ns: What it would have saved in each step, shape [steps].

        Returns:
            The median; its error is half the interquartile range of the steps. None unless at least `MIN_GAIN` of the
            step remains after the error.
        """
        low, median, high = np.quantile(saved_ns, [0.25, 0.5, 0.75])
        error = (high - low) / 2
        if median - error < MIN_GAIN * self.step_ns:
            return None
        return Gain(round(median), round(median / self.step_ns, 4), round(error / median, 4))


def unit_steps(evidence: Evidence) -> UnitSteps | str:
    """Return the latest steps of a fully sharded model, or why they cannot be judged."""
    if "units" not in evidence.shared:
        evidence.shared["units"] = _unit_steps(evidence)
    result: UnitSteps | str = evidence.shared["units"]
    return result


def _unit_steps(evidence: Evidence) -> UnitSteps | str:
    columns = evidence.columns
    if columns is None:
        return "spans of units are not available"
    if reason := _incomparable_reason(evidence):
        return reason
    try:
        spans, collective, sizes = read_spans(evidence, columns, np.arange(len(evidence.joined)))
    except ColumnsTooLargeError as error:
        return str(error)
    joined = transfers(spans, collective, sizes).latest_layout
    if sizes and not any(sizes.values()):
        return "the sizes of units are not known"  # Not every imported trace has them.
    if len(np.unique(joined.module)) != 1:
        return "no step has spans of one module's units on all ranks"
    return f"steps {_REPEATED}" if _repeat(*spans) else _in_order(evidence, columns, spans[1], joined)


def _incomparable_reason(evidence: Evidence) -> str:
    """Return why the ranks' steps cannot be compared unit by unit; empty if they can."""
    if evidence.separate_groups_reason or evidence.absence_reasons:
        return evidence.separate_groups_reason or evidence.absence_reasons[0]
    if len(evidence.joined) < MIN_STEPS:
        return f"{len(evidence.joined)} of {MIN_STEPS} steps in which all ranks can be compared"
    several = float(np.median(evidence.steps.micro_steps)) > 1
    return f"steps of several micro-batches {_REPEATED}" if several else ""


def _repeat(rank: wire.Ints, spans: wire.Spans) -> bool:
    """Whether a tenth of one module's collectives comes again in its step: a unit is used several times."""
    key = (rank * (spans.step.max(initial=0) + 1) + spans.step) * (spans.bucket.max(initial=0) + 1) + spans.bucket
    return len(np.unique(key)) < (1 - _REPEATED_SHARE) * len(key)


def _in_order(evidence: Evidence, columns: ColumnReader, spans: wire.Spans, joined: Transfers) -> UnitSteps | str:
    """Return the steps that have all collectives, as matrices."""
    module, revision = int(joined.module[0]), int(joined.revision[0])
    layout = next((each for each in columns.layouts() if (each.module, each.revision) == (module, revision)), None)
    rows, place = np.unique(joined.bucket, return_inverse=True)
    steps, step = np.unique(joined.step, return_inverse=True)
    complete = np.flatnonzero(np.bincount(step) == len(rows))
    if layout is None or len(complete) < MIN_STEPS:
        return f"only {len(complete)} of the {MIN_STEPS} steps that a judgement needs have all units on all ranks"
    cells = np.zeros((len(steps), len(rows)), np.int64)
    cells[step, place] = np.arange(len(joined))
    cells = cells[complete]
    launched_ns = spans.launched_ns[joined.row[cells]]
    since_first_ns = launched_ns[:, :, 0] - launched_ns[:, :, 0].min(axis=1, keepdims=True)
    cells = cells[:, np.argsort(np.median(since_first_ns, axis=0), kind="stable")]
    table = joined.row[cells]
    waited_ns, moving_ns = spans.waited_ns[table], joined.moving_ns[cells]
    took_ns = spans.done_ns[table] - spans.launched_ns[table]
    return UnitSteps(
        module=module,
        index=joined.bucket[cells[0]],
        rows=[layout.buckets[index] for index in joined.bucket[cells[0]].tolist()],
        launched_ns=spans.launched_ns[table],
        done_ns=spans.done_ns[table],
        waited_ns=waited_ns,
        moving_ns=moving_ns,
        exposed_ns=waited_ns.min(axis=2).astype(np.float64),
        blocks=np.asarray((waited_ns == took_ns).all(axis=(0, 2))),
        step_ns=float(np.median(evidence.joined.step_ns)),
    )


def unsteady_reason(evidence: Evidence, units: UnitSteps) -> str:
    """Return why the link alone does not explain the collectives' times; empty if it does.

    Collectives on a device have the device's own copies beside the computation; those of gloo need processors, also if
    they block no thread.
    """
    disturbed = disturbed_share(units.moving_ns.sum(axis=1))
    if disturbed > DISTURBED_SHARE:
        return f"{percent(disturbed)} of the collectives' time is beyond that of their fastest tenth"
    needs_processors = units.blocks.any() or any(hello.device == "cpu" for hello in evidence.hellos.values())
    lack = shortage(evidence) if needs_processors else ""
    return f"{lack.sentence}, which a transfer beside the computation needs too" if isinstance(lack, Shortage) else ""


def free_ns(units: UnitSteps, began_ns: wire.Ints, ended_ns: wire.Ints) -> Floats:
    """Return the time without any collective between two moments, the shortest over the ranks; shape [steps].

    Args:
        units: The collectives.
        began_ns: Shape [steps, ranks].
        ended_ns: Same shape.
    """
    begin, end = (
        np.clip(times, began_ns[:, None], np.maximum(began_ns, ended_ns)[:, None])
        for times in (units.launched_ns, units.done_ns)
    )
    order = np.argsort(begin, axis=1, kind="stable")
    begin, end = (np.take_along_axis(times, order, axis=1) for times in (begin, end))
    until = np.maximum.accumulate(end, axis=1)
    before = np.concatenate([began_ns[:, None], until[:, :-1]], axis=1)
    busy_ns: npt.NDArray[np.int64] = np.maximum(0, until - np.maximum(begin, before)).sum(axis=1)
    result: Floats = np.maximum(0, ended_ns - began_ns - busy_ns).min(axis=1).astype(np.float64)
    return result
