"""Log of the training thread's events.

Between two calls into telemetry, training evicts the processor's caches. So a call costs as much as the number of
memory locations it touches. On the training thread an entry is a stamp and an append. `Entries.catch_up` interprets
many entries at once, in `step_tracker.StepTracker`: that was most of the time.

Process-wide hooks report loaders, backward and optimizers to the journal, so that the user's code stays unchanged. The
DDP module reports forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.autograd import Variable

from ddpobs.clocks import Clock, Stamp
from ddpobs.never_raises import never_raises
from ddpobs.recording import after_fork
from ddpobs.recording.entries import MAX_ENTRIES, Entries
from ddpobs.recording.evaluation_mode import EvaluationMode
from ddpobs.recording.nested_backwards import NestedBackwards, NestedForward
from ddpobs.recording.open_place import OpenPlace
from ddpobs.recording.place.last_place import Slots
from ddpobs.recording.probes.counter_reader import CounterReader
from ddpobs.recording.probes.loop_frames import Places, places_on_stack
from ddpobs.recording.resting import Resting
from ddpobs.recording.training_thread import OtherForward, TrainingThread
from ddpobs.recording.waits import Waits
from ddpobs.steps.raw_step import BACKWARD, DATA, EXPOSED_COMM, FORWARD, OPTIMIZER, OTHER, InputSize, RawStep
from ddpobs.steps.step_tracker import StepTracker
from ddpobs.torch_seam.autograd import is_repetition_reentrant

_FORWARDS_PER_STACK = 64


class Journal:
    """Records the events of the training thread; calls of other threads are not recorded.

    Args:
        clock: Source of stamps.
        on_step: Called with each closed `RawStep` on the replaying thread; must not block.
        most: Entries after which the training thread replays them itself.
        on_caught_up: As for `Entries`.
        slots: The process's place (`last_place.LastPlace`), which outlives it.
        counters: Reads the counters that explain own time; None to read none.

    Attributes:
        thread: The training thread, and what it is inside of.
        place: Where it is, outliving the process.
        entries: Its events, waiting for their replay.
        waits: Its waits outside of the reducer.
        resting: Rests of telemetry.
        evaluation: Whether evaluation mode marks evaluations.
        modules: Number of DDP modules.
        trained: Indexes of the modules whose gradients were reduced.
        on_backward_end: Called when a backward has ended, the outermost or a nested one, with whether it raised.
        synchronised: Synchronised backward passes that have begun.
        buffer_broadcasts: Broadcasts of a DDP module's buffers that have begun.
        optimizer_is_running: Returns whether an optimizer's step that began is still on the stack.
        forwards: Training forwards so far.
        forward_places: Code objects on the stack of a recent training forward; empty before the second one.
    """

    def __init__(
        self,
        clock: Clock,
        on_step: Callable[[RawStep], object],
        most: int = MAX_ENTRIES,
        on_caught_up: Callable[[int, bool, list[tuple[int, Stamp, Stamp]]], object] = lambda *_: None,
        slots: Slots | None = None,
        *,
        counters: CounterReader | None = None,
    ) -> None:
        self._clock, self._now, self._counters = clock, clock.now, counters
        self.thread, self.place, self.evaluation = TrainingThread(), OpenPlace(slots), EvaluationMode()
        self.entries = Entries(StepTracker(on_step), self.place, most, on_caught_up)
        self.waits = Waits(clock, self.entries, self.thread)
        self.resting = Resting(clock, self.thread, self.place, self.entries, self.waits)
        self._waiting = 0
        """Phase of the separate call in which training waits for gradients; 0 outside of one."""
        self._nested = NestedBackwards()
        self._trainable: set[int] = set()
        """Modules that ran a training forward with gradients."""
        self._optimizers = 0
        """Optimizer steps under way, also after an error: torch does not report it."""
        self.modules = self.synchronised = self.buffer_broadcasts = self.forwards = 0
        self.trained: set[int] = set()
        self.on_backward_end: list[Callable[[bool], None]] = []
        self.forward_places: Places = {}
        self.optimizer_is_running: Callable[[], bool | None] = lambda: True
        after_fork.reset_after_fork(self)

    def forward_began(self, module: int, training: bool, size: InputSize) -> None:
        """A DDP module's forward was called."""
        thread = self.thread
        if self.resting.forward_began(training) or self._is_nested_forward(module, training, size):
            return
        if thread.in_backward and self._confirm_in_backward():
            return  # Checkpointing repeats the forward inside backward.
        if thread.is_elsewhere():
            if not torch.is_grad_enabled():
                return  # Inference beside training.
            if self.trained:
                thread.other_forward = OtherForward(get_ident(), training, self._now(), module, size)
                return  # If a backward follows, training moved to this thread.
        self.evaluation.forward_began(training)
        if not training:
            evaluates = self.evaluation.is_evaluating()
            self.waits.interruptions += 1
            if evaluates or self.modules == 1 or self.evaluation.trains or module in self._trainable:
                self.entries.record(StepTracker.evaluation_began, self._now(), evaluates)
            return  # Otherwise it is a teacher of a trained module, and part of the step.
        if module not in self._trainable and torch.is_grad_enabled():
            self._trainable.add(module)
        thread.ident, thread.started = get_ident(), True
        self._leave_optimizer()
        if self.place.reduced and (self.place.optimized or self.modules == 1):
            self.place.close_step()
            if self.modules == 1 and self.resting.begin_if_due():
                return
        self.place.enter(FORWARD)
        self.entries.record(StepTracker.forward_began, self._now(), module, torch.is_grad_enabled(), *size)
        self.forwards += 1
        if self.forwards % _FORWARDS_PER_STACK == 2:
            self.forward_places = places_on_stack(sys._getframe())

    def fetch_began(self, loader: int = 0) -> bool:
        """A batch was requested from a loader, identified by any number; return whether the event was recorded."""
        if get_ident() != self.thread.ident and not self.thread.is_current():
            return False
        if (self.thread.paused and not self.resting.end_if_over()) or self._leave_step():
            return False
        self.place.enter(DATA)
        evaluating = self.evaluation.is_evaluating()
        if evaluating:
            self.evaluation.fetch_began(self.forwards)
        # Some scripts validate with the model left in training mode, so the gradient mode is recorded too.
        self.entries.record(StepTracker.fetch_began, self._now(), torch.is_grad_enabled(), evaluating, loader)
        return True

    def _leave_step(self) -> bool:
        """What comes next belongs to a new step, if the open one has reduced its gradients; True if it rests."""
        self.thread.started = True
        self._leave_optimizer()
        if not self.place.reduced:
            return False
        self.place.close_step()
        return self.modules == 1 and self.resting.begin_if_due()

    def _leave_optimizer(self) -> None:
        """Detect an optimizer's step that an error ended, of which torch only reports the begin, and an exchange."""
        if self._optimizers and not self.optimizer_is_running():
            self._optimizers = 0
            self.entries.append((StepTracker.optimizer_failed, self._now(), ()))
        self.waits.look_for_exchange()

    def fetch_ended(self, raised: bool = False) -> None:
        """The loader returned a batch, or had none, or raised an error."""
        if not raised:
            self.place.enter(OTHER)
        self.entries.append((StepTracker.fetch_ended, self._now(), ()))

    def closing_began(self) -> bool:
        """The workers of an iterator that was dropped between two calls end; return whether the event was recorded."""
        if self.thread.paused or get_ident() != self.thread.ident or not self.place.is_in(OTHER):
            return False
        self.place.enter(DATA)
        self.entries.record(StepTracker.closing_began, self._now())
        return True

    def closing_ended(self) -> None:
        """The workers have ended."""
        self.place.enter(OTHER)
        self.entries.append((StepTracker.closing_ended, self._now(), ()))

    def schedule_began(self) -> bool:
        """A pipeline's schedule began a step of micro-batches; return whether the event was recorded."""
        if self.thread.paused or self.thread.in_backward or not self.thread.is_current() or self._leave_step():
            return False
        self.place.enter(OTHER)
        self.entries.record(StepTracker.schedule_began, self._now())
        return True

    def schedule_ended(self) -> None:
        """The schedule's step returned, or raised an error."""
        self.entries.append((StepTracker.schedule_ended, self._now(), ()))

    def optimizer_began(self, *_: object) -> None:
        """An optimizer's step was called."""
        if not self.thread.paused and (get_ident() == self.thread.ident or self.thread.is_current()):
            self._optimizers += 1
            self.place.optimized = True
            self.place.enter(OPTIMIZER)
            self.entries.record(StepTracker.optimizer_began, self._now())

    def optimizer_ended(self, *_: object) -> None:
        """The optimizer returned."""
        if not self.thread.paused and (get_ident() == self.thread.ident or self.thread.is_current()):
            if self._optimizers:
                self._optimizers -= 1
            self.place.enter(OPTIMIZER if self._optimizers else self._waiting or OTHER)
            self.entries.append((StepTracker.optimizer_ended, self._now(), ()))

    def backward_began(self) -> bool:
        """`torch.autograd.backward` was called.

        Returns:
            False for a call that is not training's: its end must not be reported.
        """
        thread = self.thread
        if thread.paused:
            return False
        task = torch._C._current_graph_task_id()
        if task >= 0 and (thread.in_backward or self._nested.has_forward(task)):
            self._nested_backward_began(task)
            return True
        if thread.in_backward and self._confirm_in_backward():
            return False
        is_trainings = get_ident() == thread.ident or thread.is_current() or self._training_thread_moved()
        # In evaluation mode the first backward begins the step.
        if not (is_trainings and (thread.started or self.evaluation.is_evaluating())):
            thread.unrecorded_backward = get_ident()
            return False
        self._nested.forget()
        thread.started = thread.in_backward = True
        self.place.enter(BACKWARD)
        self.entries.record(StepTracker.backward_began, self._now())
        return True

    def backward_ended(self, raised: bool = False) -> None:
        """The innermost backward that was recorded returned or raised."""
        if self.on_backward_end:
            self._call_backward_end(raised)
        if self._nested:
            self._nested_backward_ended()
            return
        self.thread.in_backward = False
        self._nested.forget()
        if not raised:
            self._leave_backward()
        self.entries.append((StepTracker.backward_ended, self._now(), ()))

    def waiting_began(self, phase: int = EXPOSED_COMM) -> bool:
        """Training waits for gradients in a separate call of that phase; False if it is not recorded."""
        if self.thread.paused or self.thread.in_backward or not self.thread.is_current():
            return False
        self.thread.started, self._waiting = True, phase
        self.place.enter(phase)
        self.entries.record(StepTracker.waiting_began, self._now(), phase)
        return True

    def waiting_ended(self) -> None:
        """The gradients arrived, or an error ended the wait."""
        self.place.optimized |= self._waiting == OPTIMIZER
        self._waiting = 0
        self._leave_backward()
        self.entries.append((StepTracker.waiting_ended, self._now(), ()))

    def gradients_reduced(self, module: int, record: Any) -> None:
        """The gradients of a DDP module were reduced in the backward under way."""
        if not self.thread.started:
            self.zeros_contributed()  # The capture of a graph dropped the step; other ranks may have captured nothing.
            return
        self.trained.add(module)
        self._nested.gradients_reduced()
        facts = module, record, self.evaluation.gradients_reduced()
        self.entries.append((StepTracker.gradients_reduced, 0, facts))
        self.place.gradients_reduced()
        if not (self.thread.in_backward or self._waiting):
            self._leave_backward()
            self.entries.append((StepTracker.engine_backward_ended, self._now(), ()))

    def zeros_contributed(self) -> None:
        """This rank took part with zeros in a synchronised backward of other ranks; it has no step for it."""
        self.place.count_synchronised()
        self.entries.record(StepTracker.zeros_contributed, 0)

    @never_raises
    def pause(self, begins: bool) -> None:
        """The capture of a CUDA graph begins or has ended."""
        self.resting.stop()
        self.thread.paused, self.thread.started = begins, False
        self.entries.append((StepTracker.step_abandoned, 0, ()))
        self.entries.catch_up()  # Releases the step's CUDA events now, not during the capture.
        self._clock.set_capturing(begins)

    def _is_nested_forward(self, module: int, training: bool, size: InputSize) -> bool:
        """Whether this forward runs inside a backward and may have a backward of its own, for which it then waits."""
        task = torch._C._current_graph_task_id()
        if task < 0 or not training or not torch.is_grad_enabled():
            return False
        reentrant = is_repetition_reentrant()
        if reentrant is False:
            return False
        self._nested.forward_began(NestedForward(task, self._now(), module, size, bool(reentrant)))
        return True

    def _nested_backward_began(self, task: int) -> None:
        """A backward was called in that graph task. Without a forward it is a checkpoint's inside a DDP module."""
        now, forwards = self._now(), self._nested.backward_began(task)
        if not forwards:
            return
        if not self.thread.in_backward:
            self._adopt_outer_backward(forwards[0].began)
        self.evaluation.forward_began(training=True)
        for forward in forwards:
            self._trainable.add(forward.module)
            facts = forward.module, forward.size, forward.repeats
            self.entries.record(StepTracker.nested_forward_began, forward.began, *facts)
        if not forwards[-1].repeats:
            self.entries.record(StepTracker.nested_backward_began, now)

    def _nested_backward_ended(self) -> None:
        is_pass, reduced = self._nested.backward_ended()
        if reduced:
            self.read_counters()
        if is_pass or reduced:
            self.entries.append((StepTracker.nested_backward_ended, self._now(), (is_pass,)))

    def _adopt_outer_backward(self, began: Stamp) -> None:
        """Record the running outer backward, which began before training did or without torch's function."""
        if self.thread.take_unrecorded_backward():
            self.waits.training_interrupted()
        self.thread.started = self.thread.in_backward = True
        self.entries.record(StepTracker.backward_began, began)
        Variable._execution_engine.queue_callback(self._adopted_backward_ended)

    @never_raises
    def _adopted_backward_ended(self) -> None:
        if self.thread.in_backward:
            self.backward_ended()

    @property
    def number(self) -> int:
        """Number of the open step, or of the next one."""
        return self.entries.open_step()[0]

    @property
    def phase(self) -> int:
        """Current phase of the training thread, as an index into `wire.PHASES`."""
        return self.entries.open_step()[1]

    @never_raises
    def finish(self) -> None:
        """Close the open step if it synchronised anything, at the end of training."""
        self.resting.stop()
        if self.thread.started:
            self.waits.look_for_exchange()
            self.entries.append((StepTracker.training_finished, self._now(), ()))
        self.entries.catch_up()

    def _leave_backward(self) -> None:
        if self.place.backward_ended():
            self.read_counters()
        self.place.enter(OPTIMIZER if self._optimizers else OTHER)

    def read_counters(self) -> None:
        """Record the counters at the end of a synchronised backward, or of an exchange."""
        if self._counters is not None:
            self.entries.append((StepTracker.counters_read, 0, self._counters.read()))

    @never_raises
    def _call_backward_end(self, raised: bool) -> None:
        for callback in tuple(self.on_backward_end):  # A module that is collected meanwhile removes its callback.
            callback(raised)

    def _confirm_in_backward(self) -> bool:
        """Return whether a backward is really under way: an interrupt may have prevented the report of its end."""
        if self.thread.left_backward():
            self.thread.in_backward = False
            self._nested.forget()
        return self.thread.in_backward

    def _training_thread_moved(self) -> bool:
        """Whether this thread, which called the latest forward, trains from now on."""
        forward = self.thread.moves_here()
        if forward is None:
            return False
        self.waits.training_interrupted()
        if forward.training:
            self.evaluation.forward_began(training=True)
            self.entries.record(StepTracker.forward_began, forward.began, forward.module, True, *forward.size)
        return True

    def reset_after_fork(self) -> None:
        """Begin anew in a forked child (a loader worker)."""
        self.entries.reset_after_fork()
        self.place.reset_after_fork()
        if self._counters is not None:
            self._counters.reset()
        self.thread.started = False
