"""Steps of a known link and a known contention, as a run would measure them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ddpobs.whatif import Observed
from ddpobs.whatif.buckets import fill
from ddpobs.whatif.link import Floats, Link
from ddpobs.whatif.replay import Replayed, replay
from ddpobs.whatif.strategies import CONTENTION_NS

MS = 1e6


@dataclass(frozen=True)
class World:
    """A training of 40 gradients. The first arrives at 0, the last at `backward_ms` if nothing else runs.

    Its thread is on a processor for the share `busy` of its computation, where a byte that moves costs `CONTENTION_NS`.
    """

    link: Link = field(default_factory=lambda: Link(0.2 * MS, 8.0, is_separated=True))
    busy: float = 0.0
    backward_ms: float = 60.0
    base_ms: float = 50.0
    parameter_bytes: float = 400_000.0
    steps: int = 40
    noise: float = 0.0

    @property
    def arrival_ns(self) -> Floats:
        return np.linspace(0.0, self.backward_ms * MS, 40)

    @property
    def sizes(self) -> Floats:
        return self.parameter_bytes * np.tile([0.5, 1.5, 1.0, 1.0], 10)

    @property
    def slowdown(self) -> float:
        lost = self.busy * CONTENTION_NS / self.link.beta_ns
        return lost / (1 - lost)

    def replay(self, caps_mb: tuple[float, ...]) -> Replayed:
        ready_ns, sizes = fill(self.arrival_ns, self.sizes, caps_mb)
        return replay(ready_ns, sizes, self.link, self.slowdown)

    def step_ns(self, *caps_mb: float) -> float:
        """Return the time of a step."""
        return self.base_ms * MS + self.replay(caps_mb).end_ns

    def observed(self, *caps_mb: float) -> Observed:
        """Return the steps as measured with these caps."""
        ends = fill(np.arange(40.0), self.sizes, caps_mb)[0]
        bucket = np.searchsorted(ends, np.arange(40.0))
        timeline = self.replay(caps_mb)
        arrival_ns = replay(self.arrival_ns, np.zeros(40), Link(0.0, 0.0, is_separated=True)).ready_ns
        step_ns = self.step_ns(*caps_mb)
        computing_ns = step_ns - timeline.exposed_ns
        delay_ns = self.busy * CONTENTION_NS / self.link.beta_ns * computing_ns / 2
        factor = 1 + self.noise * np.random.default_rng(1).standard_normal(self.steps)
        knots = np.append(-1.0, fill(self.arrival_ns, self.sizes, caps_mb)[0])
        return Observed(
            step_ns=step_ns * factor,
            ready_ns=np.outer(factor, timeline.ready_ns),
            moving_ns=np.outer(factor, moving_ns(timeline)),
            done_ns=np.outer(factor, timeline.done_ns),
            bucket_bytes=np.asarray(np.bincount(bucket, self.sizes), np.float64),
            exposed_ns=timeline.exposed_ns * factor,
            world_size=2,
            arrival_ns=np.interp(arrival_ns, knots, np.append(0.0, timeline.ready_ns)),
            parameter_bytes=self.sizes,
            parameter_bucket=bucket,
            run_delay_ns=delay_ns * np.ones(self.steps),
            running_ns=(self.busy * computing_ns - delay_ns) * np.ones(self.steps),
        )


def moving_ns(timeline: Replayed) -> Floats:
    """Return the time of each transfer from its begin or the end of the one before, as a run measures it."""
    order = np.argsort(timeline.done_ns)
    before_ns = np.append(0.0, timeline.done_ns[order][:-1])
    times_ns = np.zeros(len(order))
    times_ns[order] = timeline.done_ns[order] - np.maximum(before_ns, timeline.begun_ns[order])
    return times_ns
