"""Replay one backward: gradients arrive, buckets queue, their bytes move, and computation slows down meanwhile.

Source: the replay of a queue follows dPRO (arXiv 2205.02473). The slowdown of computation beside communication is a
parameter of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs.whatif.link import Floats, Link


@dataclass(frozen=True)
class Replayed:
    """Times of one backward since its first gradient.

    Attributes:
        ready_ns: When each bucket's last gradient is ready, with the slowdown, shape [buckets].
        begun_ns: When its transfer begins, same shape.
        done_ns: When it ends, same shape.
    """

    ready_ns: Floats
    begun_ns: Floats
    done_ns: Floats

    @property
    def end_ns(self) -> float:
        """Completion of the last transfer."""
        return float(self.done_ns.max())

    @property
    def exposed_ns(self) -> float:
        """Time from the last gradient to the last completion."""
        return max(0.0, self.end_ns - float(self.ready_ns.max()))


def replay(
    work_ns: Floats,
    sizes: Floats,
    link: Link,
    slowdown: float = 0.0,
    *,
    queues: int = 1,
    fixed_ns: Floats | None = None,
    drag: float = 1.0,
) -> Replayed:
    """Replay one backward.

    Buckets are launched in order. Bucket i goes to queue i modulo `queues`, which moves `link.in_flight` at a time.
    Transfers that move at once share the link's bandwidth, and overlap in their latency.

    Args:
        work_ns: Computation from the first gradient until each bucket is full, shape [buckets].
        sizes: Bytes that move, same shape.
        link: The link.
        slowdown: Extra time that computation takes while communication runs, as a share: 0.2 for a fifth.
        queues: Process groups that take buckets in turn.
        fixed_ns: Further time of each transfer that no other transfer shares, same shape.
        drag: How many times as long bytes move until the last bucket is full.
    """
    count = len(sizes)
    work = np.maximum.accumulate(work_ns).tolist()
    latency = (np.full(count, link.alpha_ns) + (0.0 if fixed_ns is None else fixed_ns)).tolist()
    moving = (link.beta_ns * sizes).tolist()
    ready, begun, done = [0.0] * count, [0.0] * count, [0.0] * count
    waiting: list[list[int]] = [[] for _ in range(queues)]
    active: list[list[int]] = [[] for _ in range(queues)]
    now, worked, launched, finished = 0.0, 0.0, 0, 0
    while finished < count:
        while launched < count and work[launched] <= worked:
            ready[launched] = now
            waiting[launched % queues].append(launched)
            launched += 1
        for queue in range(queues):
            while len(active[queue]) < link.in_flight and waiting[queue]:
                bucket = waiting[queue].pop(0)
                active[queue].append(bucket)
                begun[bucket] = now
        running = [bucket for of_queue in active for bucket in of_queue]
        sharing = max(1, sum(latency[bucket] <= 0 for bucket in running)) * (drag if launched < count else 1.0)
        rate = 1 / (1 + slowdown) if running else 1.0
        steps = [latency[bucket] if latency[bucket] > 0 else moving[bucket] * sharing for bucket in running]
        if launched < count:
            steps.append((work[launched] - worked) / rate)
        step = min(steps)
        now += step
        worked = work[launched] if launched < count and step == steps[-1] else worked + step * rate
        for bucket in running:
            if latency[bucket] > 0:
                latency[bucket] = latency[bucket] - step if latency[bucket] > step else 0.0
            elif (left := moving[bucket] - step / sharing) > 1e-6:
                moving[bucket] = left
            else:
                moving[bucket] = 0.0
            if latency[bucket] <= 0 and moving[bucket] <= 0:
                done[bucket] = now
                active[bucket % queues].remove(bucket)
                finished += 1
    return Replayed(np.array(ready), np.array(begun), np.array(done))


def without_slowdown(times_ns: Floats, timeline: Replayed, slowdown: float) -> Floats:
    """Return the computation that is behind some measured times: the slowdown beside communication is taken out.

    Args:
        times_ns: Times since the first gradient, any shape.
        timeline: The transfers under which they were measured.
        slowdown: As for `replay`.
    """
    order = np.argsort(timeline.begun_ns, kind="stable")
    begun, done = timeline.begun_ns[order], np.maximum.accumulate(timeline.done_ns[order])
    begun = np.maximum(begun, np.append(0.0, done[:-1]))
    beside_ns = np.clip(times_ns[..., None] - begun, 0.0, np.maximum(0.0, done - begun)).sum(axis=-1)
    return np.asarray(times_ns - slowdown / (1 + slowdown) * beside_ns)
