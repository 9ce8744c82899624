"""Predict the step after a change, with an interval, or give the reason why not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddpobs.whatif.buckets import best_split
from ddpobs.whatif.fit import buckets_of
from ddpobs.whatif.link import Floats, Link
from ddpobs.whatif.model import Change, Fitted, Prediction, Typical
from ddpobs.whatif.refusal import refusal
from ddpobs.whatif.repair import repaired_ns
from ddpobs.whatif.replay import Replayed, replay
from ddpobs.whatif.strategies import HOST_NS, STRATEGY_COSTS, StrategyCost

CAPS_MB = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
"""Limits among which `best_caps` looks; 25 is DDP's default."""
_CONTENTION_RANGE = (0.5, 1.5)
"""Range of the contention that an interval counts, as multiples of the fitted one."""
_UNKNOWN_CONTENTION = 0.1
"""Share of computation lost beside communication that an interval counts where it was not measured: an assumption."""
_MAX_WAIT_SHARE = 0.5
"""Maximum wait of an advised bucket for its last gradient, as a share of backward: a late gradient holds up so much."""
_MAX_SPREAD = 2.0
"""Maximum ratio of an interval's ends that still is a prediction for other ranks."""
_COVERAGE = 1.645
"""Standard deviations that hold nine in ten values."""
LAUNCH_NOISE = 0.02
"""Standard deviation of the step over launches of the same training, as a share of it. `benchmarks.whatif` launched
twelve trainings twice on a virtual machine: nine pairs differed by less than 5 %, by 2.4 % in the root mean square."""


def predict(fitted: Fitted, change: Change) -> Prediction | str:
    """Predict a batch's time after a change; returns the reason if the run does not show it.

    The prediction is the measured step times the ratio of two replays: with the change, and of the run as it is. The
    interval is the envelope of the same prediction from all steps but one block, with the most latency that explains
    the transfers, and from more or less contention. It is widened by the noise of the blocks' own steps, and by the
    replay's error on the run as it is, in proportion to the communication that changes.
    """
    if reason := refusal(fitted, change):
        return reason
    after, timeline, sizes = _after(fitted, fitted.typical, change)
    before, before_timeline, _ = _after(fitted, fitted.typical, Change())
    now_ns = fitted.step_ns / fitted.batches
    ratios = [_ratio(fitted, typical, change) for typical in _variants(fitted)]
    if change.world_size is not None and max(ratios) > _MAX_SPREAD * min(ratios):
        return (
            f"the latency of a transfer is not known well enough for {change.world_size} ranks: {min(ratios):.1f} to "
            f"{max(ratios):.1f} times the present step; smaller buckets, as bucket_cap_mb=0.5, show it"
        )
    step_ns = now_ns * after / before
    changed = abs(timeline.exposed_ns - before_timeline.exposed_ns) / max(1.0, before_timeline.exposed_ns)
    error_ns = float(np.hypot(_COVERAGE * fitted.noise_ns, fitted.replay_error_ns * min(1.0, changed))) / fitted.batches
    return Prediction(
        step_ns=step_ns,
        low_ns=max(0.0, min(step_ns, now_ns * min(ratios)) - error_ns),
        high_ns=max(step_ns, now_ns * max(ratios)) + error_ns,
        now_ns=now_ns,
        exposed_ns=timeline.exposed_ns,
        ready_ns=timeline.ready_ns,
        begun_ns=timeline.begun_ns,
        done_ns=timeline.done_ns,
        bucket_bytes=sizes,
        batches=change.batches or fitted.batches,
    )


def of_a_launch(prediction: Prediction) -> tuple[float, float]:
    """Return the ends of the interval of the step that a launch with the change measures, in ns.

    The prediction's own interval is that of the step in this same launch. Another launch differs even without a change.
    """
    noise_ns = _COVERAGE * LAUNCH_NOISE * prediction.step_ns
    below_ns = float(np.hypot(prediction.step_ns - prediction.low_ns, noise_ns))
    above_ns = float(np.hypot(prediction.high_ns - prediction.step_ns, noise_ns))
    return max(0.0, prediction.step_ns - below_ns), prediction.step_ns + above_ns


def best_caps(fitted: Fitted, change: Change | None = None) -> tuple[Change, Prediction] | str:
    """Return the limits of the buckets that give the shortest step, beside another change.

    It compares the limits of `CAPS_MB`, and the list of limits of `best_split`, whose buckets wait for their last
    gradient for at most half of backward.
    """
    change = change or Change()
    tried = [replace(change, caps_mb=(cap,)) for cap in CAPS_MB]
    if fitted.parameters_known:
        typical = fitted.typical
        max_wait_ns = _MAX_WAIT_SHARE * float(typical.arrival_ns.max())
        split = best_split(typical.arrival_ns, typical.sizes, _link(fitted, typical.link, change), max_wait_ns)
        tried.append(replace(change, caps_mb=tuple(split)))
    results = [(each, predict(fitted, each)) for each in tried]
    known = [(each, result) for each, result in results if isinstance(result, Prediction)]
    if not known:
        return next(result for _, result in results if isinstance(result, str))
    return min(known, key=lambda one: one[1].step_ns)


def _variants(fitted: Fitted) -> list[Typical]:
    """Return the other fits, and the fit with other contention.

    What moves bytes computes on a processor, too. Beside the training thread it may have half of it, and bytes then
    move half as fast, unless the link is the slower of the two.
    """
    typical = fitted.typical
    if not fitted.slowdown_is_known:
        return [*fitted.variants, replace(typical, contention_ns=_UNKNOWN_CONTENTION * typical.link.beta_ns)]
    others = [*fitted.variants, *(typical.with_contention_of(factor) for factor in _CONTENTION_RANGE)]
    return [*others, typical.dragged()] if typical.link.beta_ns <= 2 * typical.contention_ns else others


def _ratio(fitted: Fitted, typical: Typical, change: Change) -> float:
    """Return a batch's time after the change, as a multiple of the replayed one before."""
    return _after(fitted, typical, change)[0] / _after(fitted, typical, Change())[0]


def _after(fitted: Fitted, typical: Typical, change: Change) -> tuple[float, Replayed, Floats]:
    """Return a batch's time, the replay of the synchronised backward, and the buckets' bytes."""
    present = STRATEGY_COSTS.get(fitted.strategy, StrategyCost())
    cost = present if change.strategy is None else STRATEGY_COSTS[change.strategy]
    work_ns, sizes = buckets_of(typical, change)
    link = _link(fitted, typical.link, change)
    fixed_ns = link.alpha_ns * (cost.messages - present.messages) * np.ones(len(sizes))
    if fitted.on_processor:
        work_ns = work_ns + (cost.launch_ns - present.launch_ns) * np.cumsum(sizes)
        fixed_ns = fixed_ns + (cost.transfer_ns - present.transfer_ns) * sizes
    moved = sizes * cost.payload / present.payload
    queues, slowdown = change.groups or 1, typical.slowdown(link)
    timeline = replay(work_ns, moved, link, slowdown, queues=queues, fixed_ns=fixed_ns, drag=typical.drag)
    step_ns = typical.base_ns + timeline.end_ns - _saved_beside(fitted, change)
    return _by_batch(fitted, typical, change, step_ns), timeline, sizes


def _by_batch(fitted: Fitted, typical: Typical, change: Change, step_ns: float) -> float:
    """Return the mean time of a batch. A batch that is not reduced computes alone, and runs no optimizer."""
    batches = change.batches or fitted.batches
    if batches == fitted.batches:
        return step_ns / batches
    alone_ns = typical.base_ns + float(typical.arrival_ns.max()) - fitted.optimizer_ns
    return (step_ns + (batches - 1) * alone_ns) / batches


def _saved_beside(fitted: Fitted, change: Change) -> float:
    """Return what a step saves outside of its buckets: a repaired rank, and the map of unused parameters."""
    saved_ns = 0.0
    if change.repaired_rank is not None and fitted.own_ns is not None:
        phase = None if change.repaired_phase is None else fitted.phases.index(change.repaired_phase)
        saved_ns += float(np.mean(repaired_ns(fitted.own_ns, change.repaired_rank, phase)))
    if change.find_unused is False and fitted.find_unused_ns is not None:
        saved_ns += fitted.find_unused_ns
    return saved_ns


def _link(fitted: Fitted, link: Link, change: Change) -> Link:
    if change.world_size is not None:
        link = link.with_ranks(change.world_size, fitted.world_size)
    if change.link_gbps is not None:
        link = link.with_rate(change.link_gbps, change.world_size or fitted.world_size)
        link = replace(link, beta_ns=link.beta_ns + (HOST_NS if fitted.on_processor else 0.0))
    elif change.link_factor is not None:
        host_ns = min(HOST_NS, link.beta_ns) if fitted.on_processor else 0.0
        link = replace(link, beta_ns=host_ns + (link.beta_ns - host_ns) / change.link_factor)
    return link
