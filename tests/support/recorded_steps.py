"""A training on one clock made by hand, whose steps are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ddpobs import wire
from ddpobs.recording.journal import Journal
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.steps.raw_step import RawStep
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.summary import Summariser, Summary


class FakeClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.captures: list[bool] = []

    def now(self) -> int:
        return self.now_ns

    def times(self, stamps: Sequence[int]) -> Sequence[int]:
        return stamps

    def is_ready(self, stamp: int) -> bool:
        return stamp > 0

    def duration_ns(self, work: object) -> int:
        return wire.UNKNOWN

    def set_capturing(self, begins: bool) -> None:
        self.captures.append(begins)


class Step(NamedTuple):
    """One row of a summary."""

    collective: int
    start_ns: int
    end_ns: int
    phases_ns: list[int]
    own_phases_ns: list[int] | None
    comm_ns: int
    micro_steps: int
    samples: int
    flags: int
    spans_done_ns: list[int]
    readiness: int


def rows(summary: Summary) -> list[Step]:
    steps = summary.steps
    return [
        Step(
            collective=steps.collective[row],
            start_ns=steps.start_ns[row],
            end_ns=steps.end_ns[row],
            phases_ns=[getattr(steps, f"{name}_ns")[row] for name in wire.PHASES],
            own_phases_ns=None
            if steps.own_ns[row] == wire.UNKNOWN
            else [getattr(steps, f"own_{name}_ns")[row] for name in wire.OWN_PHASES],
            comm_ns=steps.comm_ns[row],
            micro_steps=steps.micro_steps[row],
            samples=steps.samples[row],
            flags=steps.flags[row],
            spans_done_ns=summary.spans.done_ns[summary.spans.step == number].tolist(),
            readiness=sum(sample.step == number for sample in summary.readiness),
        )
        for row, number in enumerate(steps.step)
    ]


class Training:
    """Drives a journal and a recorder like a training loop, on a fake clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.raw: list[RawStep] = []
        self.offered: list[object] = []
        self.journal = Journal(self.clock, self.raw.append)
        self.module = torch.nn.Linear(2, 2)
        self.recorder = self.add_recorder(0, self.module)
        bucket = wire.Bucket(size_bytes=8, dtype="float32", parameters=[wire.Parameter(name="w", size=2)])
        self.recorder.layout([bucket, bucket], "all_reduce")
        self._summariser = Summariser()
        self._done: list[Step] = []

    def add_recorder(self, index: int, module: torch.nn.Module) -> ModuleRecorder:
        return ModuleRecorder(
            index, module, self.journal, clock=self.clock, offer=self.offered.append, readiness_every=2
        )

    def event(self, kind: str, step: int, detail: dict[str, wire.Scalar]) -> None:
        self.offered.append(kind)

    def spend(self, ns: int) -> None:
        self.clock.now_ns += ns

    def fetch(self, ns: int, loader: int = 0) -> None:
        recorded = self.journal.fetch_began(loader)
        self.spend(ns)
        if recorded:
            self.journal.fetch_ended()

    def forward(self, ns: int, training: bool = True) -> None:
        self.module.train(training)
        self.recorder.forward_began((torch.zeros(4, 2),))
        self.spend(ns)

    def backward(self, compute: int, exposed: int, tail: int = 0, synchronised: bool = True) -> None:
        """Bucket 0 is ready half-way and done 1 ns later; bucket 1 is ready at the end and done `exposed` later."""
        self.journal.backward_began()
        if not synchronised:
            self.spend(compute)
            self.journal.backward_ended()
            return
        record = self.recorder.backward()
        assert record is not None
        self.spend(compute // 2)
        record.ready_ns[0] = record.launched_ns[0] = self.clock.now_ns
        record.done_ns[0] = self.clock.now_ns + 1
        self.spend(compute - compute // 2)
        record.ready_ns[1] = record.launched_ns[1] = self.clock.now_ns
        self.spend(exposed)
        record.done_ns[1] = self.clock.now_ns
        self.spend(tail)
        self.recorder.finished(record)
        self.journal.backward_ended()

    def optimizer(self, ns: int) -> None:
        self.journal.optimizer_began()
        self.spend(ns)
        self.journal.optimizer_ended()

    def steps(self) -> list[Step]:
        self.journal.finish()
        if fresh := self.raw[len(self._done) :]:
            self._done += rows(self._summariser.summarise(RawSteps.from_steps(fresh, self.clock)))
        return self._done


def phases(step: Step) -> dict[str, int]:
    return {name: ns for name, ns in zip(wire.PHASES, step.phases_ns, strict=True) if ns}


def own(step: Step) -> dict[str, int]:
    assert step.own_phases_ns is not None
    return {name: ns for name, ns in zip(wire.OWN_PHASES, step.own_phases_ns, strict=True) if ns}


def plain_step(training: Training, **ns: int) -> None:
    training.fetch(ns.get("data", 10))
    training.forward(ns.get("forward", 20))
    training.backward(ns.get("backward", 40), ns.get("exposed", 30), ns.get("tail", 0))
    training.optimizer(ns.get("optimizer", 5))
    training.spend(ns.get("other", 3))
