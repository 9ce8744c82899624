"""What-if: the exposed communication of a typical step with other buckets, bytes, or order.

A parameter is ready when its slowest rank is. Buckets are filled in order, and one bucket moves at a time, in the time
that the run's own link takes. The replay of the run's own buckets against its measurement gives the error.

Source: dPRO (arXiv 2205.02473) replays a step from its own trace; here only its communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis import link_model
from ddpobs_server.analysis.evidence import MIN_STEPS, ColumnReader, ColumnsTooLargeError, Evidence
from ddpobs_server.analysis.finding import Gain
from ddpobs_server.analysis.joined_steps import Floats
from ddpobs_server.analysis.link_model import LinkModel
from ddpobs_server.analysis.transfers import Transfers, late_ranks, read_transfers

MIN_GAIN = 0.03
"""Least predicted saving, as a share of the step, that is reported."""
HALF_PRECISION = 0.5
CAST_NS = 0.5
"""Time per byte of casting a gradient on a processor there and back: an assumption, to the disadvantage of the gain."""
_FIRST_CAP_BYTES = 2**20
"""Torch's limit of the first bucket."""


@dataclass(frozen=True)
class Replay:
    """A typical step, and its replay.

    Attributes:
        transfers: The measured transfers.
        model: The run's own link.
        ready_ns: Readiness of each bucket on its slowest rank, in launch order, shape [buckets].
        sizes: Bytes, same shape.
        now_ns: Replayed exposed time.
        error_ns: Difference between the replayed and the measured exposed time.
        step_ns: Typical step.
    """

    transfers: Transfers
    model: LinkModel
    ready_ns: Floats
    sizes: Floats
    now_ns: float
    error_ns: float
    step_ns: float

    def gain(self, ready_ns: Floats, sizes: Floats, extra_ns: float = 0.0) -> Gain | None:
        """Return the gain of other buckets; None unless it is at least `MIN_GAIN` of the step after its error.

        Args:
            ready_ns: Readiness of each bucket in launch order.
            sizes: Their bytes.
            extra_ns: Time that the change itself costs.
        """
        saved_ns = self.now_ns - link_model.exposed_ns(ready_ns, sizes, self.model) - extra_ns
        if saved_ns - self.error_ns < MIN_GAIN * self.step_ns:
            return None
        return Gain(round(saved_ns), round(saved_ns / self.step_ns, 4), round(self.error_ns / saved_ns, 4))


@dataclass(frozen=True)
class Arrivals:
    """Parameters in the order in which their gradients arrive on their slowest rank.

    Attributes:
        names: Shape [parameters].
        ready_ns: Since the step's first gradient, shape [parameters].
        sizes: Bytes, shape [parameters].
    """

    names: list[str]
    ready_ns: Floats
    sizes: Floats

    def buckets(self, cap_bytes: float, first_cap_bytes: float = _FIRST_CAP_BYTES) -> tuple[Floats, Floats]:
        """Fill buckets in this order, as torch does: a bucket is closed once it has reached its limit.

        Returns:
            Readiness and size of each bucket.
        """
        ready, sizes, limit = [0.0], [0.0], min(first_cap_bytes, cap_bytes)
        for at_ns, size in zip(self.ready_ns.tolist(), self.sizes.tolist(), strict=True):
            if sizes[-1] >= limit:
                ready.append(0.0)
                sizes.append(0.0)
                limit = cap_bytes
            ready[-1], sizes[-1] = max(ready[-1], at_ns), sizes[-1] + size
        return np.array(ready), np.array(sizes)


def replay_of(evidence: Evidence) -> Replay | str:
    """Return the replay of the latest steps, or why there is none."""
    if "replay" not in evidence.shared:
        evidence.shared["replay"] = _replay(evidence)
    result: Replay | str = evidence.shared["replay"]
    return result


def _replay(evidence: Evidence) -> Replay | str:
    if evidence.columns is None:
        return "bucket spans are not available"
    try:
        transfers = read_transfers(evidence, evidence.columns, np.arange(len(evidence.joined))).latest_layout
    except ColumnsTooLargeError as error:
        return str(error)
    if transfers.steps < MIN_STEPS:
        return f"only {transfers.steps} of the {MIN_STEPS} steps that a judgement needs have bucket spans of all ranks"
    model = link_model.fit_transfers(transfers)
    ready_ns, sizes = link_model.typical_step(transfers)
    now_ns = link_model.exposed_ns(ready_ns, sizes, model)
    error_ns = abs(now_ns - float(np.median(transfers.exposed_by_step_ns)))
    return Replay(transfers, model, ready_ns, sizes, now_ns, error_ns, float(np.median(evidence.joined.step_ns)))


def half_precision_gain(evidence: Evidence, replay: Replay) -> Gain | None:
    """Return the gain of half the bytes, less the time of the casts on a processor."""
    on_processor = any(hello.device == "cpu" for hello in evidence.hellos.values())
    cast_ns = CAST_NS * float(replay.sizes.sum()) if on_processor else 0.0
    return replay.gain(replay.ready_ns, HALF_PRECISION * replay.sizes, cast_ns)


def exposes_communication(evidence: Evidence) -> bool:
    """Whether the least exposed time over the ranks is above `MIN_GAIN` of the step: else no bucket can gain that."""
    joined = evidence.joined
    if len(joined.ranks) < 2 or len(joined) < MIN_STEPS or evidence.absent_ranks or evidence.separate_groups_reason:
        return False
    exposed_ns = float(np.median(joined.exposed_ns.min(axis=1)))
    return exposed_ns > MIN_GAIN * float(np.median(joined.step_ns))


def arrivals(evidence: Evidence, columns: ColumnReader) -> Arrivals | None:
    """Return the typical arrival of each parameter of the only module; None if it was not sampled."""
    layouts = columns.layouts()
    if not layouts or len({layout.module for layout in layouts}) > 1:
        return None
    layout = max(layouts, key=lambda one: one.revision)
    ranks = late_ranks(evidence.joined.own_ns, evidence.joined.ranks)
    samples = columns.readiness(ranks, *evidence.step_range)
    names = [parameter.name for bucket in layout.buckets for parameter in bucket.parameters]
    times = [_since_first(sample) for _, sample in samples if _is_of(sample, layout, len(names))]
    if not times:
        return None
    ready_ns = np.median(_slowest_by_step(samples, times, layout, len(names)), axis=0)
    sizes = [
        parameter.size * bucket.size_bytes / max(1, sum(other.size for other in bucket.parameters))
        for bucket in layout.buckets
        for parameter in bucket.parameters
    ]
    order = np.argsort(ready_ns, kind="stable")
    return Arrivals([names[index] for index in order], ready_ns[order], np.array(sizes)[order])


def _is_of(sample: wire.Readiness, layout: wire.Layout, parameters: int) -> bool:
    same = sample.module == layout.module and sample.revision == layout.revision
    return same and len(sample.ready_ns) == parameters and bool((sample.ready_ns != wire.UNKNOWN).any())


def _since_first(sample: wire.Readiness) -> Floats:
    """Return each parameter's readiness since the first; an unused parameter is ready with the last."""
    used = sample.ready_ns != wire.UNKNOWN
    since_ns = sample.ready_ns - sample.ready_ns[used].min()
    return np.asarray(np.where(used, since_ns, since_ns[used].max()), np.float64)


def _slowest_by_step(
    samples: list[tuple[int, wire.Readiness]], times: list[Floats], layout: wire.Layout, parameters: int
) -> Floats:
    """Return the latest readiness over the ranks in each sampled step, shape [steps, parameters]."""
    by_step: dict[int, Floats] = {}
    usable = [sample for _, sample in samples if _is_of(sample, layout, parameters)]
    for sample, since_ns in zip(usable, times, strict=True):
        by_step[sample.step] = np.maximum(by_step.get(sample.step, since_ns), since_ns)
    return np.stack(list(by_step.values()))
