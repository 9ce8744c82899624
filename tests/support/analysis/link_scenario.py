"""Synthetic runs over a link of known latency and bandwidth, with their bucket spans; each rank on its own clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ddpobs_server.analysis.evidence import Evidence

from ddpobs import wire
from tests.support.analysis.scenario import MS, Floats, evidence_of
from tests.support.columns import make_spans, make_steps

RATE = 0.125
"""Bytes per ns: 1 Gbit/s."""


@dataclass(frozen=True)
class Run:
    """A run with one module.

    Attributes:
        sizes: Bytes of each bucket in launch order.
        ready_ms: Readiness of each bucket since backward began, same length.
        alpha_ms: Latency of a transfer.
        rate: Bytes per ns.
        steps: Number of steps.
        ranks: Number of ranks.
        before_ms: Own time before backward, of every step and rank.
        late_ms: Extra own time, shape [steps, ranks].
        slower: Factor on each step's transfers, shape [steps].
        pause_ms: Time between two steps, as of an evaluation.
        gap_ms: Own time in `data`, by step.
    """

    sizes: list[int]
    ready_ms: list[float]
    alpha_ms: float = 0.1
    rate: float = RATE
    steps: int = 60
    ranks: int = 2
    before_ms: float = 10.0
    late_ms: Floats | None = None
    slower: Floats | None = None
    pause_ms: float = 0.0
    gap_ms: Floats | None = None
    readiness: list[tuple[int, wire.Readiness]] = field(default_factory=list)

    def evidence(self, **facts: Any) -> Evidence:
        """Return the run's evidence."""
        late = np.zeros((self.steps, self.ranks)) if self.late_ms is None else self.late_ms
        slower = np.ones(self.steps) if self.slower is None else self.slower
        gap = np.zeros(self.steps) if self.gap_ms is None else self.gap_ms
        clock = np.arange(self.ranks) * 3_600_000.0
        begins, now = np.zeros((self.steps, self.ranks)), 0.0
        own, exposed, ends = begins.copy(), begins.copy(), begins.copy()
        ready = np.zeros((self.steps, self.ranks, len(self.sizes)))
        done = ready.copy()
        for step in range(self.steps):
            backward = now + gap[step] + self.before_ms + late[step]
            ready[step] = backward[:, None] + np.array(self.ready_ms)
            end = 0.0
            for bucket, size in enumerate(self.sizes):
                took = (self.alpha_ms + size / self.rate / MS) * slower[step]
                end = max(end, ready[step, :, bucket].max()) + took
                done[step, :, bucket] = end
            begins[step], ends[step] = now, end
            own[step] = ready[step].max(axis=1) - now
            exposed[step] = end - ready[step].max(axis=1)
            now = end + self.pause_ms
        backward_ms = max(self.ready_ms)
        row_rank = np.tile(np.arange(self.ranks), self.steps)
        number = np.repeat(np.arange(self.steps), self.ranks)
        forward = own - backward_ms - gap[:, None]
        times = {
            "data": np.repeat(gap[:, None], self.ranks, 1),
            "forward": forward,
            "backward": forward * 0 + backward_ms,
        }
        steps = make_steps(
            step=number,
            collective=number,
            start_ns=_ns(begins + clock),
            end_ns=_ns(ends + clock),
            exposed_comm_ns=_ns(exposed),
            comm_ns=_ns(_union(ready, done)),
            own_ns=_ns(own),
            micro_steps=1,
            flags=wire.SYNCHRONISED,
            **{f"{phase}_ns": _ns(values) for phase, values in times.items()},
            **{f"own_{phase}_ns": _ns(values) for phase, values in times.items()},
        )
        buckets = len(self.sizes)
        spans = make_spans(
            step=np.repeat(number, buckets),
            bucket=np.tile(np.arange(buckets), self.steps * self.ranks),
            ready_ns=_ns(ready + clock[:, None]),
            launched_ns=_ns(ready + clock[:, None]),
            started_ns=wire.UNKNOWN,
            done_ns=_ns(done + clock[:, None]),
        )
        columns = Columns(self.layout(), np.repeat(row_rank, buckets), spans, self.readiness)
        defaults: dict[str, Any] = {"columns": columns, "world_size": self.ranks}
        return evidence_of(row_rank, steps, **defaults | facts)

    def layout(self) -> wire.Layout:
        """Buckets with one parameter each."""
        buckets = [
            wire.Bucket(size_bytes=size, dtype="float32", parameters=[wire.Parameter(name=f"p{index}", size=size // 4)])
            for index, size in enumerate(self.sizes)
        ]
        return wire.Layout(module=0, name="model", revision=0, comm="all_reduce", buckets=buckets)


class Columns:
    """A `ColumnReader` of columns in memory."""

    def __init__(
        self,
        layout: wire.Layout,
        rank: wire.Ints,
        spans: wire.Spans,
        readiness: list[tuple[int, wire.Readiness]],
    ) -> None:
        self._layout, self._rank, self._spans, self._readiness = layout, rank, spans, readiness

    def layouts(self) -> list[wire.Layout]:
        return [self._layout]

    def spans(self, ranks: list[int], first: int, last: int) -> tuple[wire.Ints, wire.Spans]:
        rows = np.isin(self._rank, ranks) & (self._spans.step >= first) & (self._spans.step <= last)
        return self._rank[rows], self._spans.select(rows)

    def comms(self, rank: int, first: int, last: int) -> wire.Comms:
        raise NotImplementedError

    def readiness(self, ranks: list[int], first: int, last: int) -> list[tuple[int, wire.Readiness]]:
        return [(rank, sample) for rank, sample in self._readiness if rank in ranks and first <= sample.step <= last]


def hellos(ranks: int, hosts: int = 1, processors: str = "0-63", threads: int = 1) -> dict[int, wire.Hello]:
    """Return gloo ranks on some hosts."""
    return {
        rank: wire.Hello(
            host=f"node{rank % hosts}",
            pid=1,
            device="cpu",
            backend="gloo",
            versions={},
            settings={"processors": processors, "threads": threads},
        )
        for rank in range(ranks)
    }


def on_hosts(ranks: int, hosts: int = 1, processors: str = "0-63", threads: int = 1) -> dict[str, Any]:
    """Return the facts of gloo ranks on some hosts."""
    identities = hellos(ranks, hosts, processors, threads)
    return {"hellos": identities, "hosts": {rank: hello.host for rank, hello in identities.items()}}


def _union(begins: Floats, ends: Floats) -> Floats:
    """Return the length of the union of intervals in the order of their begins, over the last axis."""
    until = np.maximum.accumulate(ends, axis=-1)
    before = np.concatenate([begins[..., :1], until[..., :-1]], axis=-1)
    return np.asarray(np.maximum(0.0, until - np.maximum(begins, before)).sum(axis=-1))


def _ns(ms: Floats) -> wire.Ints:
    return np.round(np.asarray(ms).reshape(-1) * MS).astype(np.int64)
