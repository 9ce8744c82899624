"""Fit the model to measured steps, and to all but one block of them in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddpobs.whatif.buckets import fill
from ddpobs.whatif.link import Floats, Ints, Link
from ddpobs.whatif.link_of_step import links_of_steps
from ddpobs.whatif.model import Change, Fitted, Typical
from ddpobs.whatif.repair import slowdown
from ddpobs.whatif.replay import Replayed, replay, without_slowdown
from ddpobs.whatif.strategies import CONTENTION_NS

MIN_STEPS = 20
"""Minimum number of steps that a model is fitted to."""
_BLOCKS = 8
"""Blocks of successive steps, each of which is left out once."""


@dataclass(frozen=True)
class Observed:
    """Measured steps with one layout of buckets, without the first ones.

    Times of buckets begin at one event of the step on the same rank, as its first gradient or its first full bucket. A
    bucket is ready when it is ready on its slowest rank. Its transfer moves bytes from then on, or from the end of the
    transfer before it.

    Attributes:
        step_ns: Time of each step, shape [steps].
        ready_ns: Readiness of each bucket in launch order, shape [steps, buckets].
        moving_ns: Time that its transfer takes without waiting, same shape.
        done_ns: Its completion, on the rank that waits least, same shape.
        bucket_bytes: Shape [buckets].
        exposed_ns: Communication after the last gradient, without waiting, shape [steps].
        world_size: Number of ranks.
        arrival_ns: Typical arrival of each parameter's gradient since the first, on the slowest rank; in the order of
            the buckets, shape [parameters]; None if it was not measured.
        parameter_bytes: Same shape; None as well.
        parameter_bucket: Index of each parameter's bucket, same shape; None as well.
        run_delay_ns: Time of each step in which the training thread was ready to run and had no processor, shape
            [steps]; None if it was not measured.
        running_ns: Time of each step in which it was on a processor, shape [steps]; None as well.
        strategy: Name of the communication strategy.
        batches: Batches whose gradients are added before they are reduced.
        optimizer_ns: Time of the optimizer in a step.
        find_unused_ns: Time of a step that `find_unused_parameters` takes; None if it is off or not known.
        on_processor: Whether the gradients are on processors.
        own_ns: Own time of each rank by phase, shape [steps, ranks, phases]; None if it is not known.
        phases: Names of the phases.
    """

    step_ns: Floats
    ready_ns: Floats
    moving_ns: Floats
    done_ns: Floats
    bucket_bytes: Floats
    exposed_ns: Floats
    world_size: int
    arrival_ns: Floats | None = None
    parameter_bytes: Floats | None = None
    parameter_bucket: Ints | None = None
    run_delay_ns: Floats | None = None
    running_ns: Floats | None = None
    strategy: str = "all_reduce"
    batches: int = 1
    optimizer_ns: float = 0.0
    find_unused_ns: float | None = None
    on_processor: bool = True
    own_ns: Floats | None = None
    phases: tuple[str, ...] = ()


def fit(observed: Observed) -> Fitted | str:
    """Fit the model; returns why not if the steps do not suffice."""
    steps = len(observed.step_ns)
    if steps < MIN_STEPS:
        return f"{steps} of the {MIN_STEPS} steps that a prediction needs"
    if observed.world_size < 2:
        return "one rank communicates with nobody"
    rows = np.arange(steps)
    contention_ns = _contention_ns(observed)
    least, most = links_of_steps(observed.ready_ns, observed.done_ns, observed.moving_ns, observed.bucket_bytes)
    typical = _typical(observed, rows, least, contention_ns)
    blocks = np.array_split(rows, min(_BLOCKS, steps // 5))
    without = [_typical(observed, np.setdiff1d(rows, block), least, contention_ns) for block in blocks]
    left_out_ns = [float(np.median(observed.step_ns[block])) for block in blocks]
    others_ns = [float(np.median(np.delete(observed.step_ns, block))) for block in blocks]
    exposed_ns = float(np.median(observed.exposed_ns))
    return Fitted(
        typical=typical,
        variants=(*without, _typical(observed, rows, most, contention_ns)),
        step_ns=float(np.median(observed.step_ns)),
        slowdown=None if observed.own_ns is None else slowdown(observed.step_ns, observed.own_ns),
        noise_ns=float(np.sqrt(np.mean(np.square(np.subtract(left_out_ns, others_ns))))),
        replay_error_ns=abs(now(typical).exposed_ns - exposed_ns),
        exposed_ns=exposed_ns,
        slowdown_is_known=observed.run_delay_ns is not None and observed.running_ns is not None,
        parameters_known=observed.arrival_ns is not None,
        world_size=observed.world_size,
        strategy=observed.strategy,
        batches=observed.batches,
        optimizer_ns=observed.optimizer_ns,
        find_unused_ns=observed.find_unused_ns,
        on_processor=observed.on_processor,
        own_ns=observed.own_ns,
        phases=observed.phases,
    )


def now(typical: Typical) -> Replayed:
    """Replay the present buckets."""
    return replay(*present_buckets(typical), typical.link, typical.slowdown(typical.link), drag=typical.drag)


def present_buckets(typical: Typical) -> tuple[Floats, Floats]:
    """Return the computation until each present bucket is full, and its bytes."""
    first = np.flatnonzero(np.diff(typical.bucket, prepend=-1))
    return np.maximum.reduceat(typical.arrival_ns, first), np.add.reduceat(typical.sizes, first)


def buckets_of(typical: Typical, change: Change) -> tuple[Floats, Floats]:
    """Return the computation until each bucket is full, and its bytes, with the caps of a change."""
    if change.caps_mb is None:
        return present_buckets(typical)
    return fill(typical.arrival_ns, typical.sizes, change.caps_mb)


def _typical(observed: Observed, rows: Ints, link: Link, contention_ns: float) -> Typical:
    """Return the typical one of some steps, with a link that moves data as long as they do."""
    ready_ns = np.median(observed.ready_ns[rows], axis=0)
    ready_ns -= ready_ns.min()
    moving_ns = observed.moving_ns.sum(axis=1)
    link = link.scaled(float(np.median(moving_ns[rows])) / max(1.0, float(np.median(moving_ns))))
    arrival_ns, sizes, bucket = _parameters(observed, ready_ns)
    measured = Typical(arrival_ns, sizes, bucket, link, contention_ns, 0.0)
    timeline = replay(*present_buckets(measured), link)
    free = replace(measured, arrival_ns=without_slowdown(arrival_ns, timeline, measured.slowdown(link)))
    return replace(free, base_ns=float(np.median(observed.step_ns[rows])) - now(free).end_ns)


def _parameters(observed: Observed, ready_ns: Floats) -> tuple[Floats, Floats, Ints]:
    """Return arrival, bytes and bucket of each parameter, or of whole buckets if the parameters are not known.

    The parameters' arrival comes from few sampled steps. It is moved to the readiness of their bucket in all steps.
    """
    arrival_ns, sizes, bucket = observed.arrival_ns, observed.parameter_bytes, observed.parameter_bucket
    if arrival_ns is None or sizes is None or bucket is None:
        return ready_ns, observed.bucket_bytes, np.arange(len(ready_ns))
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    sampled_ns = np.maximum.reduceat(arrival_ns, first)
    since_first_ns = ready_ns + sampled_ns.min()
    knots = np.append(0.0, np.maximum.accumulate(sampled_ns))
    return np.interp(arrival_ns, knots, np.append(0.0, np.maximum.accumulate(since_first_ns))), sizes, bucket


def _contention_ns(observed: Observed) -> float:
    """Return the computation that a byte costs which moves beside it, in ns.

    A training thread on a processor loses `CONTENTION_NS`. The run's own evidence counts as much as the share of a
    step's bytes that moves beside computation: half of what the thread loses there is time without a processor.
    """
    if observed.run_delay_ns is None or observed.running_ns is None:
        return 0.0
    delay_ns, running_ns = float(np.median(observed.run_delay_ns)), float(np.median(observed.running_ns))
    computing_ns = float(np.median(observed.step_ns - observed.exposed_ns))
    busy = min(1.0, (running_ns + delay_ns) / max(1.0, computing_ns)) if observed.on_processor else 0.0
    ready_ns = np.median(observed.ready_ns, axis=0)
    done_ns = np.maximum.accumulate(ready_ns + np.median(observed.done_ns - observed.ready_ns, axis=0))
    last_ns = float(ready_ns.max())
    begun_ns = np.minimum(done_ns, np.maximum(ready_ns, np.append(0.0, done_ns[:-1])))
    beside_ns = np.maximum(0.0, np.minimum(done_ns, last_ns) - np.minimum(begun_ns, last_ns))
    beside_bytes = float((observed.bucket_bytes * beside_ns / np.maximum(1.0, done_ns - begun_ns)).sum())
    lost_ns = 2 * delay_ns * min(1.0, float(beside_ns.sum()) / max(1.0, computing_ns))
    all_bytes = float(observed.bucket_bytes.sum())
    return (busy * CONTENTION_NS * all_bytes + lost_ns) / (all_bytes + beside_bytes)
