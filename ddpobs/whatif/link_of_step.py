"""The link of a run's steps: latency, bandwidth, and how many transfers move at once.

Transfers that move at once share the bandwidth, so the time of one says little: a small one ends late beside a large
one. A step shows when each ends, and how long data moves. So it is replayed with latency as each share of that time,
and with one and with two transfers at once. torch's process group of gloo has two threads, and moves two buckets at
once; those of NCCL and MPI move one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ddpobs.whatif.link import SEPARABLE, SMALL_BYTES, Floats, Link
from ddpobs.whatif.replay import Replayed, replay

_SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0)
"""Latency, as shares of the time in which data moves."""
_REFINEMENTS = 5
"""How often the gaps beside the best share are halved."""
_MAX_IN_FLIGHT = 2
_BETTER = 0.9
"""Error of a replay with more transfers at once, over that with fewer, below which there are more."""
_AS_GOOD = 1.5
"""Error of a replay that is about as good as the best, as a multiple of the best's."""
_QUANTILE = 0.25
"""Quantile of the completions that latency is fitted to. A process that waits for a processor ends a transfer later,
never earlier: the medians would count that as latency."""
_MAX_BUCKETS = 256
"""First buckets of a step that are replayed. Their number is a client's, and later ones hardly change their ends."""
_SCALINGS = 3
"""Replays after which data moves as long as in the step: the latency of transfers that move at once overlaps."""


def links_of_steps(ready_ns: Floats, done_ns: Floats, moving_ns: Floats, sizes: Floats) -> tuple[Link, Link]:
    """Return the links with the least and with the most latency that explain the steps.

    They are the same, and not separated, if the buckets have about one size, but for one that is larger: the last one,
    which moves beside no computation, may be faster by that alone. All time then counts as bytes, or as latency if the
    buckets are below `SMALL_BYTES`. The links explain early ends, and move data as long as the median
    step.

    Args:
        ready_ns: Readiness of each bucket in launch order, shape [steps, buckets].
        done_ns: Its completion since the same event, same shape.
        moving_ns: Time that its transfer takes without waiting, same shape.
        sizes: Its bytes, shape [buckets].
    """
    first = slice(None, _MAX_BUCKETS)
    typical_ns = np.median(ready_ns[:, first], axis=0)
    ends_ns = typical_ns + np.quantile(done_ns[:, first] - ready_ns[:, first], _QUANTILE, axis=0)
    early_ns = float(np.quantile(moving_ns[:, first].sum(axis=1), _QUANTILE))
    begin_ns = typical_ns.min()
    step = _Step(np.maximum.accumulate(typical_ns - begin_ns), ends_ns - begin_ns, sizes[first], early_ns)
    factor = float(np.median(moving_ns[:, first].sum(axis=1))) / max(1.0, early_ns)
    least, most = _explaining(step)
    return least.scaled(factor), most.scaled(factor)


def _explaining(step: _Step) -> tuple[Link, Link]:
    sizes = step.sizes
    is_small = float(sizes.max()) < SMALL_BYTES
    is_separated = not is_small and _differ(sizes)
    shares = _SHARES if is_separated else (float(is_small),)
    tries = [step.tried(share, 1) for share in shares]
    for in_flight in range(2, 1 + _MAX_IN_FLIGHT):
        more = [step.tried(share, in_flight) for share in shares]
        if _least(more).error < _BETTER * _least(tries).error:
            tries = more
    if not is_separated:
        link = replace(tries[0].link, is_separated=False)
        return link, link
    for _ in range(_REFINEMENTS):
        best = tries.index(_least(tries))
        beside = [each.share for each in tries[max(0, best - 1) : best + 2]]
        middles = [(low + high) / 2 for low, high in pairwise(beside)]
        tries = sorted([*tries, *(step.tried(share, tries[0].link.in_flight) for share in middles)], key=_share)
    good = [each.link for each in tries if each.error <= _AS_GOOD * _least(tries).error]
    return good[0], good[-1]


def _differ(sizes: Floats) -> bool:
    """Return whether sizes allow to separate latency from bandwidth. The largest of several does not by itself."""
    ordered = np.sort(sizes)[: max(2, len(sizes) - 1)]
    return bool(ordered[-1] >= SEPARABLE * ordered[0])


@dataclass(frozen=True)
class _Try:
    """A link with a share of latency, and the error of its replay as a share of the time in which data moves."""

    share: float
    link: Link
    error: float


@dataclass(frozen=True)
class _Step:
    ready_ns: Floats
    done_ns: Floats
    sizes: Floats
    moving_ns: float

    def tried(self, share: float, in_flight: int) -> _Try:
        alpha_ns = share * self.moving_ns / len(self.sizes)
        beta_ns = (1 - share) * self.moving_ns / float(self.sizes.sum())
        link = Link(alpha_ns, beta_ns, is_separated=True, in_flight=in_flight)
        for _ in range(_SCALINGS):
            link = link.scaled(self.moving_ns / max(1.0, _moving_ns(self._replayed(link))))
        errors_ns = np.abs(self._replayed(link).done_ns - self.done_ns)
        return _Try(share, link, float(errors_ns.mean()) / max(1.0, self.moving_ns))

    def _replayed(self, link: Link) -> Replayed:
        return replay(self.ready_ns, self.sizes, link)


def _least(tries: Sequence[_Try]) -> _Try:
    return min(tries, key=lambda each: each.error)


def _share(each: _Try) -> float:
    return each.share


def _moving_ns(timeline: Replayed) -> float:
    """Return the time in which at least one transfer is under way."""
    order = np.argsort(timeline.begun_ns, kind="stable")
    begun_ns, done_ns = timeline.begun_ns[order], np.maximum.accumulate(timeline.done_ns[order])
    idle_ns = np.maximum(0.0, begun_ns[1:] - done_ns[:-1]).sum()
    return float(done_ns[-1] - begun_ns[0] - idle_ns)
