"""Where a step begins and ends, and the training thread's phase in between.

The journal's replay (`recording/journal.py`) reports events and their stamps in order. The tracker only keeps
*switches*: (phase, stamp) pairs. Durations come later (`summary.Summariser`).

The tracker runs on the telemetry thread: on the training thread it cost, with a callback for the last bucket, 0.14 ms
of a step of 8.4 ms. A DDP module's wait happens inside backward and is laid over it afterwards; an optimizer's wait
(Horovod) is a call of its own, and a phase at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpobs.clocks import Stamp
from ddpobs.steps.counters import Reading
from ddpobs.steps.evaluation_guess import EvaluationGuess, Fetch
from ddpobs.steps.raw_step import (
    AFTER_CHECKPOINT,
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    EXPOSED_COMM,
    FORWARD,
    NO_INPUT,
    OPTIMIZER,
    OTHER,
    WAITING,
    InputSize,
    Position,
    RawStep,
    Segment,
)
from ddpobs.wire import COMM_KINDS

_UNUSED_MAP = COMM_KINDS.index("unused_map")
_MAX_SWITCHES = 100_000
"""Switches of a step that never synchronises, some 10,000 micro-batches; it then begins anew."""
_HABIT_STEPS = 8
"""Consecutive steps with a wait at a barrier after which such waits count as part of the step."""
_USER = COMM_KINDS.index("user")
_MAX_COMMS = 50_000
"""Collectives recorded per step: the collector refuses a batch of 100,000 records."""


class StepTracker:
    """Turn events into steps.

    Args:
        on_step: Called with each closed `RawStep`.

    Attributes:
        stamp: Stamp of the next event.
        gap_is_data: The time between the end of a step and the next training forward belongs to the data phase of the
            next step: a batch is asked of an iterator that reports no fetches (`recording/code_samples.py`).
    """

    def __init__(self, on_step: Callable[[RawStep], object]) -> None:
        self._on_step = on_step
        self.stamp: Stamp = 0
        self.gap_is_data = False
        self._gap_is_pure = False
        """Nothing but the training loop's own code has run since the last switch."""
        self._base = OTHER
        """Phase outside of the calls on the stack."""
        self._stack: list[int] = []
        """Phases of the calls under way, the innermost last."""
        self._number = 0
        self._step: RawStep | None = None
        self._records: list[Any] = []
        """Records of the backward under way."""
        self._modules_done: set[int] = set()
        """Modules with gradients reduced in the open step."""
        self._optimizer_ran = False
        """An optimizer was called since the last synchronisation."""
        self._optimizer_waits = False
        """An optimizer was called before any step began."""
        self._closure_ran = False
        """The last synchronisation was inside an optimizer's closure."""
        self._closure_begins: int | None = None
        """Index of the switch to an optimizer; if its closure trains, the next step begins there."""
        self._next_begins: Position | None = None
        """First work after the last synchronisation that belongs to the next step if a nested pass follows."""
        self._clean = False
        self._collective = -1
        self._reading: Reading | None = None
        """Counters at the end of the synchronised backward that ends now."""
        self._comms_switched = 0
        """Collectives in the open step at its last switch."""
        self._evaluations = EvaluationGuess()
        self._cut: tuple[int, Stamp] | None = None
        """Kind and start of the time outside of the step that is under way."""
        self._has_barrier = False
        """Training waited at a barrier in the open step."""
        self._steps_with_barrier = 0

    @property
    def phase(self) -> int:
        """Current phase of the training thread, as an index into `wire.PHASES`."""
        return self._stack[-1] if self._stack else self._base

    @property
    def number(self) -> int:
        """Number of the open step, or of the next one."""
        step = self._step  # Read once: another thread may abandon the step meanwhile.
        return step.number if step else self._number

    # ------------------------------------------------------------------ events, in order

    def forward_began(self, module: int, differentiated: bool, *size: int) -> None:
        """A training forward of a DDP module was called.

        Args:
            module: Index of the module.
            differentiated: Backward may follow.
            *size: Fields of the `InputSize`. They are plain numbers, so that a waiting entry is one object.
        """
        self._end_cut()
        self._evaluations.forward_began(differentiated)
        self._open_in_optimizer()
        self._next_begins = None
        nested = OPTIMIZER in self._stack
        gap = None if nested or self._stack else self._data_gap()
        if not nested:
            self._stack.clear()  # An interrupt may have cut off the end of a call on it.
        done = self._step and self._step.segments and (self._optimizer_ran or module in self._modules_done)
        if done and not nested:
            self._close_before(gap)
        elif self._closure_begins is not None:
            self._close(self._closure_begins)
        step = self._open()
        self._evaluations.clear_step(step, self.stamp)
        step.size = step.size.plus(InputSize(*size))
        if not differentiated:
            step.no_grad_size = step.no_grad_size.plus(InputSize(*size))
        if nested and self._stack[-1] == OPTIMIZER:
            self._push(FORWARD)
            return
        self._base = FORWARD
        self._switch()

    def evaluation_began(self, evaluating: bool) -> None:
        """A forward of a DDP module was called, but not to train; `evaluating`: every module is in evaluation mode."""
        self._end_cut()
        self._gap_is_pure = False
        if self._evaluations.defers_forward(self._step, self.stamp, evaluating):
            return
        self._reject_candidate()
        if evaluating and self._step and self._step.segments:
            self._close()
        if evaluating:
            self._next_begins = None
        elif self._mark_next():
            self._switch()
        if self._evaluations.judge_forward(self._step, self.stamp, evaluating):
            self._clean = False

    def fetch_began(self, differentiated: bool, evaluating: bool, loader: int = 0) -> None:
        """A batch was requested from a loader.

        Args:
            differentiated: Gradients are enabled.
            evaluating: Every module is in evaluation mode.
            loader: Any number that identifies the loader.
        """
        self._end_cut()
        if self._stack and self._stack[-1] == DATA:  # A framework's loader calls torch's.
            self._push(DATA)
            return
        fetch = Fetch(differentiated, evaluating, loader)
        self._next_begins = None
        extends_batch = self._evaluations.extends_batch(fetch)
        if not extends_batch:
            self._reject_candidate()
        if self._step and self._step.segments:
            self._close()
        begins_batch = not (self._stack or extends_batch)
        self._evaluations.fetch_began(self._open(), self.stamp, fetch, begins_batch=begins_batch)
        if self._base != FORWARD:  # After a forward the loss may still follow.
            self._base = OTHER
        self._push(DATA)

    def fetch_ended(self) -> None:
        """The loader returned a batch, or had none."""
        self._pop()

    def schedule_began(self) -> None:
        """A pipeline's schedule began a step of micro-batches, before its first receive or forward."""
        self._end_cut()
        self._next_begins = None
        nested = bool(self._stack)
        gap = None if nested else self._data_gap()
        if self._step and self._step.segments and not nested:
            self._close_before(gap)
        self._evaluations.forward_began(differentiated=True)
        step = self._open()
        self._evaluations.clear_step(step, self.stamp)
        if not nested:
            self._base = OTHER
        self._switch()
        step.schedules.append((self.stamp, self.stamp))

    def schedule_ended(self) -> None:
        """The schedule's step returned or raised."""
        self._leave_forward()
        self._base = OTHER
        self._switch()
        if self._step is not None and self._step.schedules:
            self._step.schedules[-1] = self._step.schedules[-1][0], self.stamp

    def closing_began(self) -> None:
        """A loader's iterator was dropped, and its workers end: data, in the open step."""
        self._push(DATA)

    def closing_ended(self) -> None:
        """The workers have ended."""
        self._pop()

    def optimizer_began(self) -> None:
        """An optimizer's step was called."""
        self._optimizer_waits = self._step is None  # The first step may begin in its closure.
        self._next_begins = None
        if self._step:
            self._enter_optimizer()

    def optimizer_ended(self) -> None:
        """The optimizer returned."""
        self._optimizer_waits = False
        if not self._step:
            return
        if self._stack.count(OPTIMIZER) == 1:
            self._closure_begins = None
        self._leave_forward()
        if self._stack and self._stack[-1] == OPTIMIZER:
            self._pop()

    def optimizer_failed(self) -> None:
        """An error ended all optimizers under way."""
        self._optimizer_waits = False
        if OPTIMIZER in self._stack:
            self._stack.clear()
            self._switch()

    def backward_began(self) -> None:
        """The outermost `torch.autograd.backward` was called."""
        self._open_in_optimizer()
        self._open()
        self._evaluations.accept()
        self._leave_forward()
        self._base = OTHER
        self._mark_next()
        self._push(BACKWARD)

    def backward_ended(self) -> None:
        """The outermost backward returned or raised."""
        self._pop()
        if self._step is not None:
            self._step.micro_steps += 1
            self._close_segment(self._step)

    def nested_forward_began(self, module: int, size: InputSize, repeats: bool = False) -> None:
        """A training forward of a DDP module was called inside a backward, with a backward of its own.

        Args:
            module: Index of the module.
            size: Size of its input.
            repeats: A reentrant checkpoint repeats it: its time stays part of the outer backward.
        """
        self._begin_nested(module)
        self._evaluations.forward_began(differentiated=True)
        self._evaluations.accept()
        step = self._open()
        step.size = step.size.plus(size).without(step.no_grad_size)  # The same rows ran without gradients before.
        step.no_grad_size = NO_INPUT
        if not repeats and (not self._stack or self._stack[-1] != FORWARD):
            self._push(FORWARD)

    def nested_backward_began(self) -> None:
        """That forward's backward was called."""
        self._leave_forward()
        self._push(BACKWARD)

    def nested_backward_ended(self, is_pass: bool) -> None:
        """A nested backward returned or raised.

        Args:
            is_pass: `nested_backward_began` came before; otherwise it is a checkpoint that reduced gradients.
        """
        if is_pass:
            self._pop()
        else:
            self._switch()
        if self._step is not None:
            self._step.micro_steps += is_pass
            self._close_segment(self._step)

    def engine_backward_ended(self) -> None:
        """A backward ended that called the engine without torch's function: it stays part of forward."""
        self._base = OTHER
        self.backward_ended()

    def waiting_began(self) -> None:
        """Training waits for gradients in a separate call, as before an optimizer's step."""
        self._leave_forward()
        self._open()
        self._push(EXPOSED_COMM)

    def waiting_ended(self) -> None:
        """The gradients arrived, or an error ended the wait."""
        self._pop()
        if self._step is not None:
            self._close_segment(self._step, waited=True)

    def gradients_reduced(self, module: int, record: Any, begins_training: bool) -> None:
        """The gradients of a DDP module were reduced in the backward under way.

        Args:
            module: Index of the module.
            record: Its `module_recorder.BackwardRecord`.
            begins_training: First reduction of a training in evaluation mode: no evaluation came before it.
        """
        if self._step is None:
            return
        self._records.append(record)
        self._modules_done.add(module)
        if begins_training:
            self._evaluations.revoke()

    def comm_ended(self, module: int, kind: int, launched: Stamp, done: Stamp) -> None:
        """Communication other than a gradient bucket ended in the open step."""
        if self._step is None:
            return
        if len(self._step.comms) < _MAX_COMMS:
            self._step.comms.append((module, kind, launched, done))
        else:  # For example, hours of inference after training, with a model whose layers run in parallel.
            self._clean = False

    def counters_read(self, *reading: Any) -> None:
        """The counters were read at the end of a synchronised backward, just before that end is reported.

        Args:
            *reading: Elements of the `Reading`; none if the counters could not be read.
        """
        self._reading = reading or None

    def zeros_contributed(self) -> None:
        """This rank took part with zeros in a synchronised backward of other ranks; it has no step for it."""
        self._collective += 1
        self._clean = False

    def training_interrupted(self) -> None:
        """Work outside of training took time: own time has no clean start."""
        self._clean = self._gap_is_pure = False

    def save_began(self) -> None:
        """A checkpoint is being saved. After the optimizer's step this ends the step, else it is cut out of it."""
        self._clean = self._gap_is_pure = False
        if self._stack or self._step is None:
            return
        self._end_cut()
        if self._step.segments and self._optimizer_ran:
            self._close()
        self._begin_cut(CHECKPOINT)

    def save_ended(self) -> None:
        """The checkpoint is saved. Work until the next event of training belongs to it: renaming, an upload."""
        if self._cut is not None:
            self._end_cut()
            self._begin_cut(AFTER_CHECKPOINT)

    def waited_at_barrier(self, began: Stamp, ended: Stamp) -> None:
        """Training waited at a barrier: outside of the step if it stands between steps, and not in each of them."""
        step = self._step
        if step is None:
            return
        self._has_barrier, self._gap_is_pure = True, False
        is_over = bool(step.segments) and self._optimizer_ran
        between = self.phase == OTHER and not self._stack and (is_over or not (step.segments or step.micro_steps))
        if not between or self._steps_with_barrier >= _HABIT_STEPS:
            self.comm_ended(0, _USER, began, ended)
            return
        self.stamp = began
        self._end_cut()
        if is_over:
            self._close()
        self._begin_cut(WAITING)
        self.stamp = ended
        self._end_cut()

    def tail(self) -> tuple[int, bool, list[tuple[int, Stamp, Stamp]]]:
        """Number of the open step, whether it has begun, and (kind, began, ended) outside of it; 0 is not ended."""
        step = self._step
        if step is None:
            return self._number, False, []
        under_way = [] if self._cut is None else [(*self._cut, 0)]
        if self._evaluations.began is not None:
            under_way.append((EVALUATION, self._evaluations.began, 0))
        return step.number, len(step.switches) > 1 and not under_way, step.outside + under_way

    def step_abandoned(self) -> None:
        """The open step ends without a result: the capture of a CUDA graph begins or has ended."""
        self._number, self._cut = self.number, None
        self._step, self._stack, self._base = None, [], OTHER
        self._records, self._closure_ran, self._closure_begins, self._next_begins = [], False, None, None
        self._evaluations.step_abandoned()
        self._modules_done.clear()
        self._clean = False

    def training_finished(self) -> None:
        """Training is over: close the open step at its last switch, if it synchronised anything.

        Later time is no training: an evaluation, an upload, the wait for the exit.
        """
        self._end_cut()
        step = self._step
        if step is None or not step.segments:
            return
        trailing = step.comms[self._comms_switched :]  # Unused maps are reported after they are done: keep them.
        step.comms[self._comms_switched :] = [comm for comm in trailing if comm[1] == _UNUSED_MAP]
        self._close(max(1, len(step.switches) - 1))

    # ------------------------------------------------------------------ passes inside a backward

    def _mark_next(self) -> bool:
        """Mark the next switch as the possible begin of a step, if nothing is marked since the last synchronisation."""
        step = self._step
        if step is None or self._next_begins is not None or not (step.segments or self._evaluations.is_stale):
            return False
        self._next_begins = step.position
        return True

    def _begin_nested(self, module: int) -> None:
        """End the open step before the outer backward if a nested pass begins the next one."""
        step, begins, self._next_begins = self._step, self._next_begins, None
        if OPTIMIZER in self._stack:
            if self._closure_begins is not None:
                self._close(self._closure_begins)
        elif step is None or begins is None or begins.switches >= len(step.switches):
            return
        elif step.segments and (self._optimizer_ran or module in self._modules_done):
            self._close_at(step, begins)
        elif not (step.segments or begins.micro_steps):
            self._evaluations.begin_step(step, begins)

    # ------------------------------------------------------------------ phases

    def _enter_optimizer(self) -> None:
        # If the step was trained in closures, the next closure that trains belongs to the next step, which then begins
        # with the call of its optimizer.
        if self._closure_ran and self._step and OPTIMIZER not in self._stack:
            self._closure_begins = len(self._step.switches)
        self._optimizer_ran = True
        self._base = OTHER
        self._push(OPTIMIZER)

    def _leave_forward(self) -> None:
        """End a forward inside an optimizer's closure, at backward or at the optimizer's return."""
        if self._stack and self._stack[-1] == FORWARD:
            self._stack.pop()

    def _open_in_optimizer(self) -> None:
        """Begin the first step with its optimizer's call if an event of its closure begins training."""
        if self._optimizer_waits:
            self._optimizer_waits = False
            self._open()
            self._enter_optimizer()

    def _push(self, phase: int) -> None:
        self._stack.append(phase)
        self._switch()

    def _pop(self) -> None:
        if self._stack:  # Empty after an abandoned step.
            self._stack.pop()
        self._switch()

    def _begin_cut(self, kind: int) -> None:
        """Begin time outside of the open step."""
        step = self._open()
        if len(step.switches) < _MAX_SWITCHES:
            self._cut = kind, self.stamp
            step.cut(self.stamp)

    def _end_cut(self) -> None:
        """End the time outside of the step, if any; training goes on in the phase before it."""
        if self._cut is None:
            return
        (kind, began), self._cut = self._cut, None
        if self._step is not None:
            self._step.add_outside(kind, began, self.stamp)
            self._step.switches.append((self.phase, self.stamp))

    def _switch(self) -> None:
        self._end_cut()
        step = self._step
        if step is None:
            return
        if len(step.switches) >= _MAX_SWITCHES:
            step.switches, step.comms, step.holes, self._clean = [], [], [], False
            self._next_begins = None
            self._evaluations.forget_positions()
        step.switches.append((self.phase, self.stamp))
        self._comms_switched = len(step.comms)
        self._gap_is_pure = True

    def _data_gap(self) -> Position | None:
        """Make the time since the last switch a data phase where it counts as one; return its position."""
        step = self._step
        if not (self.gap_is_data and self._gap_is_pure and step and step.switches):
            return None
        phase, since = step.switches[-1]
        if phase != OTHER or self._base != OTHER:
            return None
        step.switches[-1] = (DATA, since)
        return Position(len(step.switches) - 1, self._comms_switched, step.size, step.micro_steps)

    # ------------------------------------------------------------------ steps

    def _open(self) -> RawStep:
        if self._step is None:
            self._step = RawStep(self._number, [(OTHER, self.stamp)])
        return self._step

    def _close(self, index: int | None = None) -> None:
        """End the step, now or at the switch of that index, and begin the next one."""
        step = self._step
        if step is None:
            return
        moved = step.switches[index:] if index is not None else []
        first_moved = len(step.switches) - len(moved)
        del step.switches[first_moved:]
        holes = [hole - first_moved + 1 for hole in step.holes if hole >= first_moved]
        step.holes = [hole for hole in step.holes if hole < first_moved]
        step.end = moved[0][1] if moved else self.stamp
        self._evaluations.step_closed()
        self._step = RawStep(step.number + 1, [(OTHER, step.end), *moved], holes=holes)
        self._steps_with_barrier = self._steps_with_barrier + 1 if self._has_barrier else 0
        self._has_barrier = False
        self._modules_done.clear()
        self._optimizer_ran = self._closure_ran = False
        self._closure_begins = self._next_begins = None
        self._on_step(step)

    def _close_before(self, gap: Position | None) -> None:
        """End the step now, or before its last switch if the next step's batch was fetched since then."""
        if gap is not None and self._step is not None:
            self._close_at(self._step, gap)
        else:
            self._close()

    def _close_at(self, step: RawStep, begins: Position) -> None:
        """End the step at an earlier position; later content moves into the next step."""
        comms, micro_steps = step.comms[begins.comms :], step.micro_steps - begins.micro_steps
        del step.comms[begins.comms :]
        step.micro_steps = begins.micro_steps
        self._close(begins.switches)
        following = self._open()
        following.comms, following.micro_steps = comms, micro_steps

    def _close_segment(self, step: RawStep, waited: bool = False) -> None:
        if self._records:
            self._collective += 1
            self._closure_ran = OPTIMIZER in self._stack
            end, reading = step.switches[-1][1], self._reading
            step.segments.append(Segment(end, self._records, self._clean, self._collective, waited, reading))
            self._reading = None
            self._records, self._clean, self._optimizer_ran, self._next_begins = [], True, False, None
            self._evaluations.accept()

    def _reject_candidate(self) -> None:
        if self._evaluations.reject():
            self._clean = False
