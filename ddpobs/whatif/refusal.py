"""What a run's steps do not show: such a change is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddpobs.whatif.fit import buckets_of, present_buckets
from ddpobs.whatif.model import Change, Fitted
from ddpobs.whatif.strategies import STRATEGY_COSTS

_LIMITS = {"batches": 1, "groups": 1, "world_size": 2}
_NOT_SEPARATED = "one bucket size seen: latency and bandwidth are not known apart"


def refusal(fitted: Fitted, change: Change) -> str:
    """Return why a change cannot be predicted from this run; empty if it can."""
    return next(_reasons(fitted, change), "")


def _reasons(fitted: Fitted, change: Change) -> Iterator[str]:
    yield from _impossible(fitted, change)
    yield from _of_link(fitted, change)
    yield from _of_ranks(fitted, change)
    yield from _of_buckets(fitted, change)


def _impossible(fitted: Fitted, change: Change) -> Iterator[str]:
    for name, least in _LIMITS.items():
        if (value := getattr(change, name)) is not None and value < least:
            yield f"{name} must be at least {least}, not {value}"
    for name in ("link_gbps", "link_factor"):
        if (value := getattr(change, name)) is not None and not value > 0:
            yield f"{name} must be above 0, not {value:g}"
    if change.caps_mb is not None and not (change.caps_mb and min(change.caps_mb) > 0):
        yield "a bucket cap must be above 0 MB"
    if change.strategy is not None and change.strategy not in STRATEGY_COSTS:
        known = ", ".join(STRATEGY_COSTS)
        yield f"the bytes of strategy {change.strategy!r} do not follow from the gradients' sizes; known are {known}"
    if change.strategy is not None and fitted.strategy not in STRATEGY_COSTS:
        yield f"the bytes of the present strategy {fitted.strategy!r} are not known"
    if change.batches not in (None, fitted.batches) and fitted.batches > 1:
        yield "the run accumulates already: the time of a batch without a reduction is not recorded"


def _of_link(fitted: Fitted, change: Change) -> Iterator[str]:
    is_other = bool(change.link_gbps or change.link_factor) or change.world_size not in (None, fitted.world_size)
    if is_other and not fitted.typical.link.is_separated:
        yield _NOT_SEPARATED


def _of_ranks(fitted: Fitted, change: Change) -> Iterator[str]:
    if change.find_unused is False and fitted.find_unused_ns is None:
        yield "find_unused_parameters is off, or its time is not recorded"
    rank = change.repaired_rank
    if rank is not None and (fitted.own_ns is None or not 0 <= rank < fitted.own_ns.shape[1]):
        yield f"the own time of rank {rank} is not recorded"
    if change.repaired_phase is not None and change.repaired_phase not in fitted.phases:
        yield f"a repaired phase must be one of {', '.join(fitted.phases)}, not {change.repaired_phase}"


def _of_buckets(fitted: Fitted, change: Change) -> Iterator[str]:
    """Yield why the times of these buckets are not known. Without a latency, small buckets would seem free."""
    if change.caps_mb is None:
        return
    present, sizes = present_buckets(fitted.typical)[1], buckets_of(fitted.typical, change)[1]
    if len(sizes) > len(present) and not fitted.parameters_known:
        yield "the arrival of the parameters was not sampled: present buckets can be merged, not split"
    if not fitted.typical.link.is_separated and float(np.median(sizes)) < float(np.median(present)):
        yield "one bucket size seen: the latency of a transfer is not known"
