"""A loop over a data loader with recorded phases."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import TensorDataset

from ddpobs import wire
from ddpobs.recording.hooks.loader_hooks import LoaderHooks
from ddpobs.recording.journal import Journal
from ddpobs.steps.raw_step import InputSize
from tests.support.recorded_steps import FakeClock

DATA = TensorDataset(torch.arange(8.0).unsqueeze(1))


class Loop:
    """A training loop with the events that its hooks report."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.raw: list[Any] = []
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.reporting = True
        self.journal = Journal(self.clock, self.raw.append)
        self.loaders = LoaderHooks(self.journal, lambda *event: self.events.append(event))

    def train(self, loader: Any) -> None:
        for (batch,) in loader:
            self.journal.forward_began(0, training=True, size=InputSize(len(batch)))
            self.journal.backward_began()
            self.journal.gradients_reduced(0, object())
            self.journal.backward_ended()
            if self.reporting:
                self.loaders.report_repeated_order()

    def phase_ns(self) -> dict[str, int]:
        """Nanoseconds of all steps by phase."""
        self.journal.finish()
        total_ns = dict.fromkeys(wire.PHASES, 0)
        for step in self.raw:
            switches = [*step.switches, (0, step.end)]
            for (phase, begin), (_, end) in pairwise(switches):
                total_ns[wire.PHASES[phase]] += end - begin
        return {phase: ns for phase, ns in total_ns.items() if ns}
