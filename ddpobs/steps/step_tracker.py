"""Where a step begins and ends, and the training thread's phase in between.

The journal's replay (`recording/journal.py`) reports events and their stamps in order. The tracker only keeps
*switches*: (phase, stamp) pairs. Durations come later (`summary.Summariser`).

The tracker runs on the telemetry thread: on training's thread it cost 0.14 ms of a step of 8.4 ms. A module's wait
happens inside backward and is laid over it afterwards; an optimizer's wait (Horovod) is a call of its own, and a phase.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpobs.clocks import Stamp
from ddpobs.steps.backward_record import BackwardRecord
from ddpobs.steps.evaluation_guess import Fetch
from ddpobs.steps.open_step import MAX_COMMS, OpenStep
from ddpobs.steps.raw_step import (
    AFTER_CHECKPOINT,
    BACKWARD,
    CHECKPOINT,
    DATA,
    EXPOSED_COMM,
    FORWARD,
    NO_INPUT,
    OPTIMIZER,
    OTHER,
    WAITING,
    InputSize,
    RawStep,
)
from ddpobs.steps.timeline import Timeline
from ddpobs.wire import COMM_KINDS

_HABIT_STEPS = 8
"""Consecutive steps with a wait at a barrier after which such waits count as part of the step."""
_USER = COMM_KINDS.index("user")


class StepTracker(Timeline):
    """Turn events into steps; each method is an event, in the order in which they come.

    Args:
        on_step: Called with each closed `RawStep`.
        first: Number of the first step, and of its synchronised backward.
    """

    def __init__(self, on_step: Callable[[RawStep], object], first: int = 0) -> None:
        super().__init__(on_step, first)
        self._optimizer_waits = False
        """An optimizer was called before any step began."""

    def forward_began(self, module: int, differentiated: bool, *size: int) -> None:
        """A training forward of a DDP module was called.

        Args:
            module: Index of the module.
            differentiated: Backward may follow.
            *size: Fields of the `InputSize`. They are plain numbers, so that a waiting entry is one object.
        """
        self.end_outside()
        self.evaluations.forward_began(differentiated)
        self._open_in_optimizer()
        self._forget_next()
        nested = OPTIMIZER in self.calls
        gap = None if nested or self.calls else self.data_gap()
        if not nested:
            self.calls.clear()  # An interrupt may have cut off the end of a call on it.
        if self.step and self.step.is_done(module) and not nested:
            self.close_before(gap)
        elif self.step and self.step.closure_begins is not None:
            self.close(self.step.closure_begins)
        step = self.open().raw
        self.evaluations.clear_step(step, self.stamp)
        step.size = step.size.plus(InputSize(*size))
        if not differentiated:
            step.no_grad_size = step.no_grad_size.plus(InputSize(*size))
        if nested and self.calls[-1] == OPTIMIZER:
            self.push(FORWARD)
            return
        self.base = FORWARD
        self.switch()

    def evaluation_began(self, evaluating: bool) -> None:
        """A forward of a DDP module was called, but not to train; `evaluating`: every module is in evaluation mode."""
        self.end_outside()
        self.gap_is_pure = False
        if self.evaluations.defers_forward(self.raw, self.stamp, evaluating):
            return
        self._reject_candidate()
        if evaluating:
            self._close_synchronised()
            self._forget_next()
        elif self._mark_next():
            self.switch()
        if self.evaluations.judge_forward(self.raw, self.stamp, evaluating):
            self.clean = False

    def fetch_began(self, differentiated: bool, evaluating: bool, loader: int = 0) -> None:
        """A batch was requested from a loader.

        Args:
            differentiated: Gradients are enabled.
            evaluating: Every module is in evaluation mode.
            loader: Any number that identifies the loader.
        """
        self.end_outside()
        if self.calls and self.calls[-1] == DATA:  # A framework's loader calls torch's.
            self.push(DATA)
            return
        fetch = Fetch(differentiated, evaluating, loader)
        self._forget_next()
        extends_batch = self.evaluations.extends_batch(fetch)
        if not extends_batch:
            self._reject_candidate()
        self._close_synchronised()
        begins_batch = not (self.calls or extends_batch)
        self.evaluations.fetch_began(self.open().raw, self.stamp, fetch, begins_batch=begins_batch)
        if self.base != FORWARD:  # After a forward the loss may still follow.
            self.base = OTHER
        self.push(DATA)

    def fetch_ended(self) -> None:
        """The loader returned a batch, or had none."""
        self.pop()

    def schedule_began(self) -> None:
        """A pipeline's schedule began a step of micro-batches, before its first receive or forward."""
        self.end_outside()
        self._forget_next()
        nested = bool(self.calls)
        gap = None if nested else self.data_gap()
        if self.step and self.step.raw.segments and not nested:
            self.close_before(gap)
        self.evaluations.forward_began(differentiated=True)
        step = self.open().raw
        self.evaluations.clear_step(step, self.stamp)
        if not nested:
            self.base = OTHER
        self.switch()
        step.schedules.append((self.stamp, self.stamp))

    def schedule_ended(self) -> None:
        """The schedule's step returned or raised."""
        self.leave_forward()
        self.base = OTHER
        self.switch()
        if self.raw is not None and self.raw.schedules:
            self.raw.schedules[-1] = self.raw.schedules[-1][0], self.stamp

    def closing_began(self) -> None:
        """A loader's iterator was dropped, and its workers end: data, in the open step."""
        self.push(DATA)

    def closing_ended(self) -> None:
        """The workers have ended."""
        self.pop()

    def optimizer_began(self) -> None:
        """An optimizer's step was called."""
        self._optimizer_waits = self.step is None  # The first step may begin in its closure.
        self._forget_next()
        if self.step:
            self._enter_optimizer(self.step)

    def optimizer_ended(self) -> None:
        """The optimizer returned."""
        self._optimizer_waits = False
        if not self.step:
            return
        if self.calls.count(OPTIMIZER) == 1:
            self.step.closure_begins = None
        self.leave_forward()
        if self.calls and self.calls[-1] == OPTIMIZER:
            self.pop()

    def optimizer_failed(self) -> None:
        """An error ended all optimizers under way."""
        self._optimizer_waits = False
        if OPTIMIZER in self.calls:
            self.calls.clear()
            self.switch()

    def backward_began(self) -> None:
        """The outermost `torch.autograd.backward` was called."""
        self._open_in_optimizer()
        self.open()
        self.evaluations.accept()
        self.leave_forward()
        self.base = OTHER
        self._mark_next()
        self.push(BACKWARD)

    def backward_ended(self) -> None:
        """The outermost backward returned or raised."""
        self.pop()
        if self.step is not None:
            self.step.raw.micro_steps += 1
            self.close_segment(self.step)

    def nested_forward_began(self, module: int, size: InputSize, repeats: bool = False) -> None:
        """A training forward of a DDP module was called inside a backward, with a backward of its own.

        Args:
            module: Index of the module.
            size: Size of its input.
            repeats: A reentrant checkpoint repeats it: its time stays part of the outer backward.
        """
        self._begin_nested(module)
        self.evaluations.forward_began(differentiated=True)
        self.evaluations.accept()
        step = self.open().raw
        step.size = step.size.plus(size).without(step.no_grad_size)  # The same rows ran without gradients before.
        step.no_grad_size = NO_INPUT
        if not repeats and (not self.calls or self.calls[-1] != FORWARD):
            self.push(FORWARD)

    def nested_backward_began(self) -> None:
        """That forward's backward was called."""
        self.leave_forward()
        self.push(BACKWARD)

    def nested_backward_ended(self, is_pass: bool) -> None:
        """A nested backward returned or raised.

        Args:
            is_pass: `nested_backward_began` came before; otherwise it is a checkpoint that reduced gradients.
        """
        if is_pass:
            self.pop()
        else:
            self.switch()
        if self.step is not None:
            self.step.raw.micro_steps += is_pass
            self.close_segment(self.step)

    def engine_backward_ended(self) -> None:
        """A backward ended that called the engine without torch's function: it stays part of forward."""
        self.base = OTHER
        self.backward_ended()

    def waiting_began(self, phase: int = EXPOSED_COMM) -> None:
        """Training waits for gradients in a separate call of that phase, as before an optimizer's step."""
        self.leave_forward()
        self.open()
        self.push(phase)

    def waiting_ended(self) -> None:
        """The gradients arrived, or an error ended the wait."""
        is_optimizer = self.phase == OPTIMIZER
        self.pop()
        if self.step is not None:
            self.close_segment(self.step, waited=True)
            self.step.optimizer_ran |= is_optimizer

    def gradients_reduced(self, module: int, record: BackwardRecord, begins_training: bool) -> None:
        """The gradients of a DDP module were reduced in the backward under way.

        Args:
            module: Index of the module.
            record: Its stamps.
            begins_training: First reduction of a training in evaluation mode: no evaluation came before it.
        """
        if self.step is None:
            return
        self.step.records.append(record)
        self.step.modules_done.add(module)
        if begins_training:
            self.evaluations.revoke()

    def comm_ended(self, module: int, kind: int, launched: Stamp, done: Stamp) -> None:
        """Communication other than a gradient bucket ended in the open step."""
        if self.step is None:
            return
        if len(self.step.raw.comms) < MAX_COMMS:
            self.step.raw.comms.append((module, kind, launched, done))
        else:  # For example, hours of inference after training, with a model whose layers run in parallel.
            self.clean = False

    def counters_read(self, *reading: Any) -> None:
        """The counters were read at the end of a synchronised backward, just before that end is reported.

        Args:
            *reading: Elements of the `Reading`; none if the counters could not be read.
        """
        if self.step is not None:
            self.step.reading = reading or None

    def zeros_contributed(self) -> None:
        """This rank took part with zeros in a synchronised backward of other ranks; it has no step for it."""
        self.collective += 1
        self.clean = False

    def training_interrupted(self) -> None:
        """Work outside of training took time: own time has no clean start."""
        self.clean = self.gap_is_pure = False

    def save_began(self) -> None:
        """A checkpoint is being saved. After the optimizer's step this ends the step, else it is cut out of it."""
        self.clean = self.gap_is_pure = False
        if self.calls or self.step is None:
            return
        self.end_outside()
        if self.step.is_over:
            self.close()
        self.open().begin_outside(CHECKPOINT, self.stamp)

    def save_ended(self) -> None:
        """The checkpoint is saved. Work until the next event of training belongs to it: renaming, an upload."""
        if self.step is not None and self.step.end_outside(self.phase, self.stamp):
            self.step.begin_outside(AFTER_CHECKPOINT, self.stamp)

    def waited_at_barrier(self, began: Stamp, ended: Stamp) -> None:
        """Training waited at a barrier: outside of the step if it stands between steps, and not in each of them."""
        step = self.step
        if step is None:
            return
        step.has_barrier, self.gap_is_pure = True, False
        is_between = step.is_over or not (step.raw.segments or step.raw.micro_steps)
        between = self.phase == OTHER and not self.calls and is_between
        if not between or self.steps_with_barrier >= _HABIT_STEPS:
            self.comm_ended(0, _USER, began, ended)
            return
        self.stamp = began
        self.end_outside()
        if step.is_over:
            self.close()
        self.open().begin_outside(WAITING, self.stamp)
        self.stamp = ended
        self.end_outside()

    def step_abandoned(self) -> None:
        """The open step ends without a result: the capture of a CUDA graph begins or has ended."""
        self.abandon()

    def training_finished(self) -> None:
        """Training is over: close the open step at its last switch, if it synchronised anything.

        Later time is no training: an evaluation, an upload, the wait for the exit.
        """
        self.end_outside()
        step = self.step
        if step is None or not step.has_trained:
            return
        step.drop_trailing()
        self.close(max(1, len(step.raw.switches) - 1))

    # ------------------------------------------------------------------ passes inside a backward

    def _mark_next(self) -> bool:
        """Mark the next switch as the possible begin of a step, if nothing is marked since the last synchronisation."""
        step = self.step
        if step is None or step.next_begins is not None or not (step.raw.segments or self.evaluations.is_stale):
            return False
        step.next_begins = step.raw.position
        return True

    def _forget_next(self) -> None:
        if self.step is not None:
            self.step.next_begins = None

    def _begin_nested(self, module: int) -> None:
        """End the open step before the outer backward if a nested pass begins the next one."""
        step = self.step
        if step is None:
            return
        begins, step.next_begins = step.next_begins, None
        if OPTIMIZER in self.calls:
            if step.closure_begins is not None:
                self.close(step.closure_begins)
        elif begins is None or begins.switches >= len(step.raw.switches):
            return
        elif step.is_done(module):
            self.close_at(step.raw, begins)
        elif not (step.raw.segments or begins.micro_steps):
            self.evaluations.begin_step(step.raw, begins)

    def _enter_optimizer(self, step: OpenStep) -> None:
        # After training in closures, the next closure that trains begins the next step, at its optimizer's call.
        if step.closure_ran and OPTIMIZER not in self.calls:
            step.closure_begins = len(step.raw.switches)
        step.optimizer_ran = True
        self.base = OTHER
        self.push(OPTIMIZER)

    def _open_in_optimizer(self) -> None:
        """Begin the first step with its optimizer's call if an event of its closure begins training."""
        if self._optimizer_waits:
            self._optimizer_waits = False
            self._enter_optimizer(self.open())

    def _close_synchronised(self) -> None:
        """Begin the next step if gradients were reduced in the open one."""
        if self.step is not None and self.step.has_trained:
            self.close()

    def _reject_candidate(self) -> None:
        if self.evaluations.reject():
            self.clean = False
