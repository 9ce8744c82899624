"""The training thread's step and phase at one moment, and what changes them: switches, ends, time outside of steps."""

from __future__ import annotations

from collections.abc import Callable

from ddpobs.clocks import Stamp
from ddpobs.steps.evaluation_guess import EvaluationGuess
from ddpobs.steps.open_step import OpenStep
from ddpobs.steps.raw_step import BACKWARD, FORWARD, OPTIMIZER, OTHER, RESTING, Position, RawStep


class Timeline:
    """Steps, each of which is open until it is closed, and the phase in the open one.

    Args:
        on_step: Called with each closed `RawStep`.
        first: Number of the first step, and of its synchronised backward.

    Attributes:
        stamp: Stamp of the current event.
        gap_is_data: The time between the end of a step and the next training forward belongs to the data phase of the
            next step: a batch is asked of an iterator that reports no fetches (`recording/looks/code_samples.py`).
        gap_is_pure: Nothing but the training loop's own code has run since the last switch.
        base: Phase outside of the calls under way.
        calls: Phases of the calls under way, the innermost last.
        step: The open step.
        clean: Own time may be measured from the last synchronisation on.
        collective: Sequence number of the last synchronised backward in this process; `first - 1` before the first.
        evaluations: What belongs to an evaluation.
        steps_with_barrier: Consecutive steps with a wait at a barrier.
    """

    def __init__(self, on_step: Callable[[RawStep], object], first: int = 0) -> None:
        self._on_step = on_step
        self._number = first
        self.stamp: Stamp = 0
        self.gap_is_data = self.gap_is_pure = False
        self.base = OTHER
        self.calls: list[int] = []
        self.step: OpenStep | None = None
        self.clean = False
        self.collective = first - 1
        self.evaluations = EvaluationGuess()
        self.steps_with_barrier = 0

    @property
    def phase(self) -> int:
        """Current phase of the training thread, as an index into `wire.PHASES`."""
        return self.calls[-1] if self.calls else self.base

    @property
    def number(self) -> int:
        """Number of the open step, or of the next one."""
        step = self.step  # Read once: another thread may abandon the step meanwhile.
        return step.raw.number if step else self._number

    @property
    def raw(self) -> RawStep | None:
        """What is recorded of the open step."""
        return self.step.raw if self.step else None

    def tail(self) -> tuple[int, bool, list[tuple[int, Stamp, Stamp]]]:
        """Number of the open step, whether it has begun, and (kind, began, ended) outside of it; 0 is not ended."""
        step = self.step
        if step is None:
            return self._number, False, []
        return step.raw.number, *step.outside(self.evaluations.began)

    # ------------------------------------------------------------------ phases

    def push(self, phase: int) -> None:
        """Begin a call's phase."""
        self.calls.append(phase)
        self.switch()

    def pop(self) -> None:
        """End the innermost call's phase."""
        if self.calls and self.calls.pop() in (BACKWARD, OPTIMIZER) and self.step is not None:
            self.step.comms_computed = len(self.step.raw.comms)  # Empty after an abandoned step.
        self.switch()

    def leave_forward(self) -> None:
        """End a forward inside an optimizer's closure, at backward or at the optimizer's return."""
        if self.calls and self.calls[-1] == FORWARD:
            self.calls.pop()

    def switch(self) -> None:
        """Record the current phase."""
        self.end_outside()
        step = self.step
        if step is None:
            return
        if step.is_full:
            step.empty()
            self.clean = False
            self.evaluations.forget_positions()
        step.switch(self.phase, self.stamp)
        self.gap_is_pure = True

    def end_outside(self) -> None:
        """End the time outside of the step, if any; training goes on in the phase before it."""
        if self.step is not None:
            self.step.end_outside(self.phase, self.stamp)

    def data_gap(self) -> Position | None:
        """Make the time since the last switch a data phase where it counts as one; return its position."""
        if not (self.gap_is_data and self.gap_is_pure and self.step) or self.base != OTHER:
            return None
        return self.step.data_gap()

    # ------------------------------------------------------------------ steps

    def open(self) -> OpenStep:
        """Return the open step; without one, begin it."""
        if self.step is None:
            self.step = OpenStep(RawStep(self._number, [(OTHER, self.stamp)]))
        return self.step

    def close(self, index: int | None = None) -> None:
        """End the step, now or at the switch of that index, and begin the next one."""
        step = self.step
        if step is None:
            return
        self.step = step.end(index, self.stamp)
        self.evaluations.step_closed()
        self.steps_with_barrier = self.steps_with_barrier + 1 if step.has_barrier else 0
        self._on_step(step.raw)

    def close_before(self, gap: Position | None) -> None:
        """End the step now, or before its last switch if the next step's batch was fetched since then."""
        if gap is not None and self.step is not None:
            self.close_at(self.step.raw, gap)
        else:
            self.close()

    def close_at(self, step: RawStep, begins: Position) -> None:
        """End the step at an earlier position; later content moves into the next step."""
        comms, micro_steps = step.comms[begins.comms :], step.micro_steps - begins.micro_steps
        del step.comms[begins.comms :]
        step.micro_steps = begins.micro_steps
        self.close(begins.switches)
        following = self.open().raw
        following.comms, following.micro_steps = comms, micro_steps

    def close_segment(self, step: OpenStep, waited: bool = False) -> None:
        """End the synchronisation under way, if there is one."""
        if step.records:
            self.collective += 1
            in_closure = OPTIMIZER in self.calls
            step.end_segment(clean=self.clean, collective=self.collective, waited=waited, in_closure=in_closure)
            self.clean = True
            self.evaluations.accept()

    def exchanged(self, module: int) -> None:
        """The script exchanged gradients or parameters by its own collectives: this synchronised the ranks."""
        if self.step is not None and self.step.end_exchange(module, clean=self.clean, collective=self.collective + 1):
            self.collective += 1
            self.clean = True
            self.evaluations.accept()

    def stepped_alone(self) -> None:
        """An optimizer steps on gradients that no rank exchanged; with its end the step is over."""
        if self.step is not None:
            self.step.stepped_alone = True

    def rest_began(self) -> None:
        """Telemetry rests: the open step ends, and what follows until the next event is no part of a step."""
        self.end_outside()
        if self.step is not None and self.step.has_trained:
            self.close()
        self.calls, self.base = [], OTHER
        self.open().begin_outside(RESTING, self.stamp)
        self.clean = self.gap_is_pure = False

    def step_rested(self) -> None:
        """Count a synchronised step in which telemetry rested."""
        self.collective += 1
        self.open().raw.number += 1

    def abandon(self) -> None:
        """End the open step without a result."""
        self._number, self.step = self.number, None
        self.calls, self.base = [], OTHER
        self.evaluations.step_abandoned()
        self.clean = False
