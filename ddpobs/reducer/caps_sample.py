"""Stamps of some backward passes, and the buckets that `ddpobs.whatif` predicts to be best from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ddpobs.buckets import assignment
from ddpobs.clocks import Stamp, clock_for
from ddpobs.comm import Pending
from ddpobs.never_raises import never_raises
from ddpobs.reducer.reducer import Reducer
from ddpobs.torch_seam.collectives import broadcast_from_first, values_of_all, wait_for
from ddpobs.torch_seam.interpreter_exit import stay_in_interpreter
from ddpobs.whatif import Change, Fitted, Observed, Prediction, best_caps, fit, predict
from ddpobs.whatif.buckets import MB
from ddpobs.whatif.link import Floats
from ddpobs.whatif.predict import CAPS_MB

MIN_GAIN = 0.01
"""Predicted gain from which a candidate is tried."""
MAX_CANDIDATES = 2


class _Backward:
    """Stamps of one backward; 0 for one that was not taken."""

    def __init__(self, parameters: int, buckets: int) -> None:
        self.arrival: list[Stamp] = [0] * parameters
        self.launched: list[Stamp] = [0] * buckets
        self.done: list[Stamp] = [0] * buckets


class CapsSample:
    """The stamps of this rank.

    Args:
        core: The reducer whose backward passes are sampled.
    """

    def __init__(self, core: Reducer) -> None:
        self._core = core
        device = core.layout.parameters[0].device
        self._clock = clock_for(device.type, device)
        self._now = self._clock.now
        self._backwards: dict[int, _Backward] = {}
        self._open = _Backward(0, 0)

    def backward_began(self, number: int) -> None:
        """Stamp the backward of that number in the sample."""
        layout = self._core.layout
        self._open = self._backwards[number] = _Backward(len(layout.parameters), len(layout.buckets))

    def arrived(self, index: int) -> None:
        """A parameter's gradient arrived."""
        self._open.arrival[index] = self._now()

    def launched(self, bucket: int, pending: Pending) -> None:
        """A bucket was launched."""
        backward, now = self._open, self._now
        backward.launched[bucket] = now()

        def done(_: object) -> None:
            backward.done[bucket] = now()
            stay_in_interpreter()

        pending.on_done(done)

    def clear(self) -> None:
        """Forget the stamps."""
        self._backwards.clear()

    def candidates(self, step_ns: list[int]) -> list[list[list[int]]]:
        """Return the assignments to try, the most promising first; the same on all ranks. A collective call.

        Args:
            step_ns: Times of the sampled steps on this rank, 0 for one that is not known; those of rank 0 count.
        """
        observed = self._observed(np.array(step_ns, np.float64))
        limits: list[list[int]] = []
        if observed is not None and self._core.group.rank() == 0:
            limits = _predicted(observed) or []  # An error on rank 0 must not leave the others in the broadcast.
        return [self._assign(each) for each in self._share(limits)]

    def _observed(self, step_ns: Floats) -> dict[str, Any] | None:
        """The arguments of `Observed` over all ranks; None if too little was stamped. A collective call.

        A rank that was out of data hurries nobody: it is ready at once, and its transfers never are the shortest.
        """
        layout, core, steps = self._core.layout, self._core, len(step_ns)
        buckets, order = len(layout.buckets), [member for bucket in layout.buckets for member in bucket.members]
        times = np.full((steps, 1 + 3 * buckets), np.inf)
        times[:, 1 : 1 + buckets] = 0.0
        arrivals = np.zeros((steps, len(order)))
        if layout.parameters[0].device.type == "cuda":
            torch.cuda.synchronize(layout.parameters[0].device)
        for number, backward in self._backwards.items():
            if number < steps and all(backward.arrival) and all(backward.launched) and all(backward.done):
                arrivals[number], times[number] = self._read(backward, order)
        sampled = times[:, 0] < np.inf
        typical = np.median(arrivals[sampled], axis=0) if sampled.any() else arrivals[0]
        mine = torch.from_numpy(np.concatenate([times.reshape(-1), typical])).to(layout.parameters[0].device)
        gathered = np.stack([each.cpu().numpy() for each in values_of_all(core.group, mine)])
        of_all = gathered[:, : times.size].reshape(-1, steps, 1 + 3 * buckets)
        exposed_ns, least_ns = of_all[:, :, 0].min(axis=0), of_all[:, :, 1 + buckets :].min(axis=0)
        rows = np.isfinite(exposed_ns) & (step_ns > 0)
        if not rows.any():
            return None
        itemsizes = [layout.bucket_of[member].buffer.element_size() for member in order]
        sizes = np.array(
            [layout.parameters[m].numel() * size for m, size in zip(order, itemsizes, strict=True)], np.float64
        )
        bucket = np.array([layout.bucket_of[member].index for member in order])
        return {
            "step_ns": step_ns[rows],
            "ready_ns": of_all[:, rows, 1 : 1 + buckets].max(axis=0),
            "moving_ns": least_ns[rows, :buckets],
            "done_ns": least_ns[rows, buckets:],
            "exposed_ns": exposed_ns[rows],
            "bucket_bytes": np.bincount(bucket, sizes),
            "world_size": core.ranks,
            "arrival_ns": gathered[:, -len(order) :].max(axis=0),
            "parameter_bytes": sizes,
            "parameter_bucket": bucket,
            "on_processor": layout.parameters[0].device.type == "cpu",
        }

    def _read(self, backward: _Backward, order: list[int]) -> tuple[Floats, Floats]:
        """Arrival by parameter; exposed time, then by bucket readiness, moving time and end; in ns since the first."""
        clock = self._clock
        arrival = np.array(clock.times(backward.arrival), np.float64)[order]
        launched, done = (np.array(clock.times(each), np.float64) for each in (backward.launched, backward.done))
        first = arrival.min()
        ends = np.cumsum([len(bucket.members) for bucket in self._core.layout.buckets])
        ready = np.array([part.max() for part in np.split(arrival, ends[:-1])])
        before = np.maximum.accumulate(np.append(-np.inf, done))[:-1]
        moving = np.maximum(0.0, done - np.maximum(launched, before))
        exposed = max(0.0, done.max() - arrival.max())
        return arrival - first, np.concatenate([[exposed], ready - first, moving, done - first])

    def _share(self, limits: list[list[int]]) -> list[list[int]]:
        """Rank 0's limits on every rank."""
        layout = self._core.layout
        width = 1 + len(layout.parameters)
        rows = [[len(each), *each, *([0] * (width - 1 - len(each)))] for each in limits]
        rows += [[0] * width] * (MAX_CANDIDATES - len(rows))
        shared = torch.tensor(rows, dtype=torch.int64, device=layout.parameters[0].device)
        wait_for(broadcast_from_first(self._core.group, [shared]))
        return [row[1 : 1 + row[0]] for row in shared.tolist() if row[0]]

    def _assign(self, limits: list[int]) -> list[list[int]]:
        layout = self._core.layout
        order = [member for bucket in layout.buckets for member in bucket.members]
        return assignment.assign_in_order(layout.parameters, order, limits, layout.expect_sparse)


@never_raises
def _predicted(observed: dict[str, Any]) -> list[list[int]]:
    """Limits as `_limits` returns them; none where the sample does not suffice."""
    fitted = fit(Observed(**observed))
    return [] if isinstance(fitted, str) else _limits(fitted)


def _limits(fitted: Fitted) -> list[list[int]]:
    """Limits in bytes of the predicted best buckets, each list with other buckets than those before it."""
    best = best_caps(fitted)
    tried = [] if isinstance(best, str) else [best]
    tried += [(change, predict(fitted, change)) for change in (Change(caps_mb=(cap,)) for cap in CAPS_MB)]  # type: ignore[misc]
    gains = [one for one in tried if isinstance(one[1], Prediction) and one[1].saved_ratio >= MIN_GAIN]
    limits: dict[tuple[float, ...], list[int]] = {}
    for change, prediction in sorted(gains, key=lambda one: one[1].step_ns):
        caps = [max(1, int(cap * MB)) for cap in change.caps_mb or ()]
        limits.setdefault(tuple(prediction.bucket_bytes.tolist()), caps)
    return list(limits.values())[:MAX_CANDIDATES]
