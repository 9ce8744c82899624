"""Synthetic runs of a fully sharded model over a link of known latency and bandwidth, each rank on its own clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ddpobs_server.analysis.evidence import Evidence

from ddpobs import wire
from tests.support.analysis.link_scenario import RATE, Columns
from tests.support.analysis.scenario import MS, Floats, evidence_of
from tests.support.columns import make_spans, make_steps

GATHER, GATHER_AGAIN, SCATTER = wire.UNIT_KINDS[:3]
_LAUNCH_MS = 0.001
"""Time that a launch takes where it does not block."""


@dataclass
class _Step:
    """One step: the ranks' clocks, the link, and the times of each collective."""

    now: Floats
    link_ms: float = 0.0
    times: dict[tuple[int, str], tuple[Floats, Floats, Floats]] = field(default_factory=dict)

    def launch(self, unit: int, kind: str, took_ms: float) -> None:
        launched = self.now.copy()
        self.link_ms = max(self.link_ms, launched.max()) + took_ms
        self.times[unit, kind] = launched, np.full(len(launched), self.link_ms), np.full(len(launched), np.inf)

    def wait(self, unit: int, kind: str) -> None:
        launched, done, _ = self.times[unit, kind]
        self.times[unit, kind] = launched, done, self.now.copy()
        self.now = np.maximum(self.now, done)


@dataclass(frozen=True)
class Sharded:
    """A run of a root and blocks; forward computes them in this order, backward takes twice as long.

    Attributes:
        sizes: Bytes of each unit, the root's first.
        compute_ms: Forward of each unit.
        forward_prefetch: Each all-gather in forward begins when the unit before is used; else after its computation.
        backward_prefetch: The same in backward, as torch does it.
        blocks: Each collective blocks the computation, as on a CPU.
        gathers_beside: All-gathers in forward do not, because the script launches them asynchronously.
        reshard: Blocks are gathered again in backward.
        late_ms: Further computation of rank 1 in the forward of the second unit.
        in_turn: Rank 0 computes as much longer in the forward of the third unit.
        jitter: Factor on each step's transfers, shape [steps].
    """

    sizes: list[int]
    compute_ms: list[float]
    forward_prefetch: bool = True
    backward_prefetch: bool = True
    blocks: bool = False
    gathers_beside: bool = False
    reshard: bool = True
    late_ms: float = 0.0
    in_turn: bool = False
    dtype: str = "float32"
    alpha_ms: float = 0.1
    steps: int = 40
    ranks: int = 2
    micro_steps: int = 1
    jitter: Floats | None = None

    def evidence(self, **facts: Any) -> Evidence:
        """Return the run's evidence."""
        jitter = np.ones(self.steps) if self.jitter is None else self.jitter
        begin, ends, steps = 0.0, [], []
        for factor in jitter:
            step = _Step(np.full(self.ranks, begin), begin)
            self._train(step, factor)
            begin = float(step.now.max())
            steps.append(step)
            ends.append(begin)
        end = np.repeat(np.array(ends)[:, None], self.ranks, 1)
        clock: Floats = np.arange(self.ranks, dtype=np.float64) * 3_600_000.0
        begins: Floats = np.concatenate([end[:1] * 0, end[:-1]]) + clock
        return self._evidence(steps, begins, end + clock, clock, facts)

    def rows(self) -> list[tuple[int, str]]:
        """Unit and kind of each row of the layout."""
        blocks = range(len(self.sizes) - 1, 0, -1)
        kinds = (GATHER_AGAIN, SCATTER) if self.reshard else (SCATTER,)
        again = [(unit, kind) for unit in blocks for kind in kinds]
        return [*((unit, GATHER) for unit in range(len(self.sizes))), *again, (0, SCATTER)]

    def layout(self) -> wire.Layout:
        """Its rows, with one parameter each."""
        names = ["(root)", *(f"blocks.{index}" for index in range(len(self.sizes) - 1))]
        buckets = [
            wire.Bucket(
                size_bytes=self.sizes[unit],
                dtype=self.dtype,
                parameters=[wire.Parameter(name=f"{names[unit]}.w", size=self.sizes[unit] // 4)],
                kind=kind,
                unit=names[unit],
            )
            for unit, kind in self.rows()
        ]
        return wire.Layout(module=0, name="model", revision=0, comm="fully_shard", buckets=buckets)

    def _train(self, step: _Step, factor: float) -> None:
        def launch(unit: int, kind: str) -> None:
            step.launch(unit, kind, (self.alpha_ms + self.sizes[unit] / RATE / MS) * factor)
            if self._blocks(kind):
                step.wait(unit, kind)
            else:
                step.now = step.now + _LAUNCH_MS

        def use(unit: int, kind: str) -> None:
            if (unit, kind) not in step.times:
                launch(unit, kind)
            if not self._blocks(kind):
                step.wait(unit, kind)

        for unit, compute in enumerate(self.compute_ms):
            use(unit, GATHER)
            if self.forward_prefetch and unit + 1 < len(self.sizes):
                launch(unit + 1, GATHER)
            step.now = step.now + compute + self._late_ms(unit)
        for unit in range(len(self.sizes) - 1, -1, -1):
            if unit and self.reshard:
                use(unit, GATHER_AGAIN)
            if self.reshard and self.backward_prefetch and unit > 1:
                launch(unit - 1, GATHER_AGAIN)
            step.now = step.now + 2 * self.compute_ms[unit]
            launch(unit, SCATTER)
        if not self.blocks:
            step.wait(0, SCATTER)

    def _blocks(self, kind: str) -> bool:
        return self.blocks and not (self.gathers_beside and kind == GATHER)

    def _late_ms(self, unit: int) -> Floats:
        """Further computation of each rank in the forward of a unit."""
        ranks = np.arange(self.ranks)
        first, second = (unit == 1) & (ranks == 1), self.in_turn & (unit == 2) & (ranks == 0)
        return np.where(first | second, self.late_ms, 0.0)

    def _evidence(
        self, steps: list[_Step], begins: Floats, ends: Floats, clock: Floats, facts: dict[str, Any]
    ) -> Evidence:
        number = np.repeat(np.arange(self.steps), self.ranks)
        rank = np.tile(np.arange(self.ranks), self.steps)
        late = np.sum([self._late_ms(unit) for unit in range(len(self.sizes))], axis=0)[rank]
        forward, backward = sum(self.compute_ms) + late, np.full(len(rank), 2 * sum(self.compute_ms))
        exposed = _flat(ends - begins) - _ns(forward + backward)
        times = {"forward": _ns(forward), "backward": _ns(backward)}
        columns = make_steps(
            step=number,
            collective=number,
            start_ns=_flat(begins),
            end_ns=_flat(ends),
            exposed_comm_ns=exposed,
            comm_ns=exposed,
            own_ns=_ns(forward + backward),
            micro_steps=self.micro_steps,
            flags=wire.SYNCHRONISED,
            **{f"{phase}_ns": values for phase, values in times.items()},
            **{f"own_{phase}_ns": values for phase, values in times.items()},
        )
        rows = self.rows()
        table = np.array([[step.times[row] for row in rows] for step in steps])  # [steps, rows, times, ranks]
        launched, done, waited_from = np.moveaxis(table, 3, 1).reshape(-1, 3).T
        clocks = np.tile(np.repeat(clock, len(rows)), self.steps)
        waited = np.where(np.isinf(waited_from), 0.0, np.maximum(0.0, done - np.minimum(waited_from, done)))
        spans = make_spans(
            step=np.repeat(number, len(rows)),
            bucket=np.tile(np.arange(len(rows)), len(number)),
            ready_ns=_ns(launched + clocks),
            launched_ns=_ns(launched + clocks),
            started_ns=wire.UNKNOWN,
            done_ns=_ns(done + clocks),
            waited_ns=_ns(done + clocks) - _ns(done - waited + clocks),
        )
        known: dict[str, Any] = {
            "columns": Columns(self.layout(), np.repeat(rank, len(rows)), spans, []),
            "world_size": self.ranks,
            "settings": {"reducer": "fully_shard"},
        }
        return evidence_of(rank, columns, **known | facts)


def _ns(ms: Floats) -> wire.Ints:
    return np.round(ms * MS).astype(np.int64)


def _flat(ms: Floats) -> wire.Ints:
    return _ns(ms.reshape(-1))
