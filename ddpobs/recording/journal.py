"""Log of the training thread's events, and its replay into steps on another thread.

Between two calls into telemetry, training evicts the processor's caches. So a call costs as much as the number of
memory locations it touches. On the training thread an entry is a stamp and an append. `catch_up` interprets many
entries at once, in `step_tracker.StepTracker`: that was most of the time.

Waiting entries occupy few container objects. Python's garbage collector counts the containers that survive. After a
quarter more than before, it visits all objects of the process, for some tenths of a second, at a different moment on
each rank.

Process-wide hooks report loaders, backward and optimizers to the journal, so that the user's code stays unchanged. The
DDP module reports forward.

The telemetry thread replays the entries every two seconds. If it hangs, in a forked child, or above about 340 steps a
second, the training thread replays them itself every 4,096 entries.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from threading import Lock, get_ident, main_thread
from time import monotonic_ns
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd import Variable

from ddpobs.clocks import Clock, Stamp
from ddpobs.never_raises import never_raises
from ddpobs.recording.nested_backwards import NestedBackwards, NestedForward
from ddpobs.recording.place.last_place import Slots, memory_slots
from ddpobs.recording.place.place_file import Slot
from ddpobs.recording.probes.counter_reader import CounterReader
from ddpobs.recording.probes.loop_frames import Places, places_on_stack
from ddpobs.steps.raw_step import BACKWARD, DATA, EXPOSED_COMM, FORWARD, OPTIMIZER, OTHER, InputSize, RawStep
from ddpobs.steps.step_tracker import StepTracker
from ddpobs.torch_seam.autograd import is_repetition_reentrant
from ddpobs.torch_seam.collectives import message_kind
from ddpobs.wire import COMM_KINDS

_log = logging.getLogger("ddpobs")
_MAX_ENTRIES = 4096
"""Entries, some hundred steps, after which the training thread replays them itself if no other thread has."""
_MAX_BACKLOG = 16 * _MAX_ENTRIES
"""Entries kept while a replay hangs, in a finalizer of the user's for example; then they are discarded."""
_ENTRY_FIELDS = 3
"""Consecutive elements of the queue that make an entry: event, stamp and facts."""
_WAIT_S = 0.1
_FORWARDS_PER_STACK = 64
_USER = COMM_KINDS.index("user")
_BARRIERS = frozenset({"barrier", "monitored_barrier"})
_PHASE, _AT_NS, _CLOSED, _SYNCHRONISED = map(int, (Slot.PHASE, Slot.AT_NS, Slot.CLOSED, Slot.SYNCHRONISED))


class Journal:
    """Records the events of the training thread; calls of other threads are not recorded.

    Args:
        clock: Source of stamps.
        on_step: Called with each closed `RawStep` on the replaying thread; must not block.
        most: Entries after which the training thread replays them itself.
        on_caught_up: Called on the replaying thread after all entries; must not raise. It and `on_step` never run at
            the same time. It gets the number of the open step, whether it has begun, and time outside of it.
        slots: The process's place (`last_place.LastPlace`), which outlives it.
        counters: Reads the counters that explain own time; None to read none.

    Attributes:
        modules: Number of DDP modules.
        trained: Indexes of the modules whose gradients were reduced.
        paused: A CUDA graph is being captured: nothing runs, and times are meaningless.
        on_backward_end: Called when a backward has returned, the outermost or a nested one.
        entries: Entries replayed so far.
        synchronised: Synchronised backward passes that have begun.
        collectives: Collectives of user code that have begun.
        buffer_broadcasts: Broadcasts of a DDP module's buffers that have begun.
        last_collective: Name of the user's collective that began last.
        waits_for_store: Name of the call that waits at the rendezvous store; empty outside of such calls.
        collective_elements: Elements that user code has handed to collectives.
        trains_in_eval: In the last reduction every module was in evaluation mode: the mode does not mark evaluations.
        evaluating: Returns whether every module is in evaluation mode.
        optimizer_is_running: Returns whether an optimizer's step that began is still on the stack.
        slots: The process's place. In a forked child it is in memory.
        last_bucket: The slot for the bucket that was launched last.
        forwards: Training forwards so far.
        interruptions: Evaluations and checkpoints so far: time around them is no part of a step.
        forward_places: Code objects on the stack of a recent training forward; empty before the second one.
    """

    def __init__(
        self,
        clock: Clock,
        on_step: Callable[[RawStep], object],
        most: int = _MAX_ENTRIES,
        on_caught_up: Callable[[int, bool, list[tuple[int, Stamp, Stamp]]], object] = lambda *_: None,
        slots: Slots | None = None,
        *,
        counters: CounterReader | None = None,
    ) -> None:
        self._clock, self._on_caught_up = clock, on_caught_up
        self._full = _ENTRY_FIELDS * min(most, _MAX_ENTRIES)
        self._now = clock.now
        self._tracker = StepTracker(on_step)
        self._replaying = Lock()
        self._counters = counters
        self._reset_entries()
        self._use_slots(memory_slots() if slots is None else slots)
        self._reduced_open_step = self._reduced_in_backward = self._optimized = False
        """For the place: gradients were reduced in the open step, in the backward under way; then an optimizer ran."""
        self._thread = 0
        self._other_thread_forward: tuple[int, bool, Stamp, int, InputSize] | None = None
        """Latest forward of another thread with gradients: thread, training or not, stamp, module, size."""
        self._started = False
        """An event of training was recorded since the start, or since the last capture of a graph."""
        self._in_backward = self._waiting = False
        self._nested = NestedBackwards()
        self._backward_thread = 0
        """Thread of the latest outermost backward that was not recorded."""
        self._trainable: set[int] = set()
        """Modules that ran a training forward with gradients."""
        self._in_collective_wait = False
        self._message = ""
        """Kind of the message that is waited for, or was last; empty for a collective."""
        self._saves = 0
        """Saves of checkpoints under way, one inside another."""
        self._optimizers = 0
        """Optimizer steps under way, also after an error: torch does not report it."""
        self._forward_trained = False
        """The last forward was a training one, not in evaluation mode."""
        self._failure_logged = False
        self.modules = 0
        self.trained: set[int] = set()
        self.paused = False
        self.on_backward_end: list[Callable[[], None]] = []
        self.entries = self.synchronised = self.collectives = self.buffer_broadcasts = 0
        self.last_collective = self.waits_for_store = ""
        self.collective_elements = 0
        self.forwards = self.interruptions = 0
        self.forward_places: Places = {}
        self.trains_in_eval = False
        self.evaluating: Callable[[], bool | None] = lambda: False
        self.optimizer_is_running: Callable[[], bool | None] = lambda: True
        _journals.add(self)

    # ------------------------------------------------------------------ on the training thread

    def forward_began(self, module: int, training: bool, size: InputSize) -> None:
        """A DDP module's forward was called."""
        if self.paused or self._is_nested_forward(module, training, size):
            return
        if self._in_backward and self._confirm_in_backward():
            return  # Checkpointing repeats the forward inside backward.
        if self._thread and self._thread != get_ident():
            if not torch.is_grad_enabled():
                return  # Inference beside training.
            if self.trained:
                self._other_thread_forward = get_ident(), training, self._now(), module, size
                return  # If a backward follows, training moved to this thread.
        if not training:
            self._forward_trained, evaluates = False, self._is_evaluating()
            self.interruptions += 1
            if evaluates or self.modules == 1 or self.trains_in_eval or module in self._trainable:
                self._record(StepTracker.evaluation_began, self._now(), evaluates)
            return  # Otherwise it is a teacher of a trained module, and part of the step.
        if module not in self._trainable and torch.is_grad_enabled():
            self._trainable.add(module)
        self._thread = get_ident()
        self._started, self._forward_trained = True, not self.trains_in_eval
        if self._optimizers:
            self._detect_failed_optimizer()
        if self._reduced_open_step and (self._optimized or self.modules == 1):
            self._close_place_step()
        self._enter(FORWARD)
        self._record(StepTracker.forward_began, self._now(), module, torch.is_grad_enabled(), *size)
        self.forwards += 1
        if self.forwards % _FORWARDS_PER_STACK == 2:
            self.forward_places = places_on_stack(sys._getframe())

    def fetch_began(self, loader: int = 0) -> bool:
        """A batch was requested from a loader, identified by any number; return whether the event was recorded."""
        if self.paused or (get_ident() != self._thread and not self._is_training_thread()):
            return False
        self._leave_step()
        self._enter(DATA)
        # Some scripts validate with the model left in training mode, so the gradient mode is recorded too.
        self._record(StepTracker.fetch_began, self._now(), torch.is_grad_enabled(), self._is_evaluating(), loader)
        return True

    def _leave_step(self) -> None:
        """What comes next belongs to a new step, if the open one has reduced its gradients."""
        self._started = True
        if self._optimizers:
            self._detect_failed_optimizer()
        if self._reduced_open_step:
            self._close_place_step()

    def fetch_ended(self, raised: bool = False) -> None:
        """The loader returned a batch, or had none, or raised an error."""
        if not raised:
            self._enter(OTHER)
        self._append((StepTracker.fetch_ended, self._now(), ()))

    def closing_began(self) -> bool:
        """The workers of an iterator that was dropped between two calls end; return whether the event was recorded."""
        if self.paused or get_ident() != self._thread or self.slots[_PHASE] != OTHER:
            return False
        self._enter(DATA)
        self._record(StepTracker.closing_began, self._now())
        return True

    def closing_ended(self) -> None:
        """The workers have ended."""
        self._enter(OTHER)
        self._append((StepTracker.closing_ended, self._now(), ()))

    def schedule_began(self) -> bool:
        """A pipeline's schedule began a step of micro-batches; return whether the event was recorded."""
        if self.paused or self._in_backward or not self._is_training_thread():
            return False
        self._leave_step()
        self._enter(OTHER)
        self._record(StepTracker.schedule_began, self._now())
        return True

    def schedule_ended(self) -> None:
        """The schedule's step returned, or raised an error."""
        self._append((StepTracker.schedule_ended, self._now(), ()))

    def optimizer_began(self, *_: object) -> None:
        """An optimizer's step was called."""
        if get_ident() == self._thread or self._is_training_thread():
            self._optimizers += 1
            self._optimized = True
            self._enter(OPTIMIZER)
            self._record(StepTracker.optimizer_began, self._now())

    def optimizer_ended(self, *_: object) -> None:
        """The optimizer returned."""
        if get_ident() == self._thread or self._is_training_thread():
            if self._optimizers:
                self._optimizers -= 1
            self._enter(OPTIMIZER if self._optimizers else OTHER)
            self._append((StepTracker.optimizer_ended, self._now(), ()))

    def backward_began(self) -> bool:
        """`torch.autograd.backward` was called.

        Returns:
            False for a call that is not training's: its end must not be reported.
        """
        if self.paused:
            return False
        task = torch._C._current_graph_task_id()
        if task >= 0 and (self._in_backward or self._nested.has_forward(task)):
            self._nested_backward_began(task)
            return True
        if self._in_backward and self._confirm_in_backward():
            return False
        if get_ident() != self._thread and not (self._is_training_thread() or self._training_thread_moved()):
            self._backward_thread = get_ident()
            return False
        if not self._started and not self._is_evaluating():  # In evaluation mode the first backward begins the step.
            self._backward_thread = get_ident()
            return False
        self._nested.forget()
        self._started = self._in_backward = True
        self._enter(BACKWARD)
        self._record(StepTracker.backward_began, self._now())
        return True

    def backward_ended(self, raised: bool = False) -> None:
        """The innermost backward that was recorded returned or raised."""
        if self.on_backward_end and not raised:
            self._call_backward_end()
        if self._nested:
            self._nested_backward_ended()
            return
        self._in_backward = False
        self._nested.forget()
        if not raised:
            self._leave_backward()
        self._append((StepTracker.backward_ended, self._now(), ()))

    def waiting_began(self) -> bool:
        """Training waits for gradients in a separate call, as before an optimizer's step; False if not recorded."""
        if self.paused or self._in_backward or not self._is_training_thread():
            return False
        self._started = self._waiting = True
        self._enter(EXPOSED_COMM)
        self._record(StepTracker.waiting_began, self._now())
        return True

    def waiting_ended(self) -> None:
        """The gradients arrived, or an error ended the wait."""
        self._waiting = False
        self._leave_backward()
        self._append((StepTracker.waiting_ended, self._now(), ()))

    def gradients_reduced(self, module: int, record: Any) -> None:
        """The gradients of a DDP module were reduced in the backward under way."""
        if not self._started:
            self.zeros_contributed()  # The capture of a graph dropped the step; other ranks may have captured nothing.
            return
        self.trained.add(module)
        self._nested.gradients_reduced()
        evaluating = not self._forward_trained and bool(self.evaluating())
        self._append((StepTracker.gradients_reduced, 0, (module, record, evaluating and not self.trains_in_eval)))
        self.trains_in_eval = evaluating
        self._reduced_open_step = self._reduced_in_backward = True
        self._optimized = False
        if not (self._in_backward or self._waiting):
            self._leave_backward()
            self._append((StepTracker.engine_backward_ended, self._now(), ()))

    def comm_ended(self, module: int, kind: int, launched: Stamp, done: Stamp) -> None:
        """Communication other than a gradient bucket ended in the open step."""
        self._record(StepTracker.comm_ended, 0, module, kind, launched, done)

    @never_raises
    def collective_wait_began(self, in_graph: bool = False, work: object = None) -> Stamp | None:
        """A wait for a collective, or for a message, begins; None if it does not block the training thread.

        Args:
            in_graph: A node of a backward waits, maybe on one of autograd's threads.
            work: The work that is waited for, if there is one.
        """
        if (
            not self._started
            or self._in_collective_wait
            or not (self._is_training_thread() or (self._in_backward and in_graph))
        ):
            return None
        self._message = message_kind(work)
        self._in_collective_wait = True
        return self._now()

    @never_raises
    def collective_wait_ended(self, began: Stamp | None) -> None:
        """The wait ended; `began` is None if it is not to be recorded."""
        self._in_collective_wait = False
        if began is None:
            return
        if self._message:
            self.comm_ended(0, COMM_KINDS.index(self._message), began, self._now())
        elif self.last_collective in _BARRIERS and not (self._saves or self._in_backward):
            self._record(StepTracker.waited_at_barrier, 0, began, self._now())
        else:
            self.comm_ended(0, _USER, began, self._now())

    def collective_began(self, name: str) -> None:
        """A collective of user code was called."""
        self.collectives += 1
        self.last_collective = name

    @never_raises
    def store_wait_began(self, name: str) -> bool:
        """A call may wait at the rendezvous store; return whether it blocks the training thread."""
        if self.waits_for_store or not self._is_training_thread():
            return False
        self.waits_for_store = name
        return True

    def store_wait_ended(self) -> None:
        """The store answered, or an error ended the call."""
        self.waits_for_store = ""

    def zeros_contributed(self) -> None:
        """This rank took part with zeros in a synchronised backward of other ranks; it has no step for it."""
        self.slots[_SYNCHRONISED] += 1
        self._record(StepTracker.zeros_contributed, 0)

    def training_interrupted(self) -> None:
        """Work outside of training takes time."""
        self.interruptions += 1
        self._record(StepTracker.training_interrupted, 0)

    @never_raises
    def save_began(self) -> bool:
        """A checkpoint is being saved; return whether its end must be reported."""
        if not (self._started and self._is_training_thread()):
            self.training_interrupted()
            return False
        self._saves += 1
        self.interruptions += 1
        if self._saves == 1:
            self._record(StepTracker.save_began, self._now())
        return True

    @never_raises
    def save_ended(self) -> None:
        """The checkpoint is saved, or an error ended it."""
        self._saves = max(0, self._saves - 1)
        if not self._saves:
            self._record(StepTracker.save_ended, self._now())

    @never_raises
    def pause(self, begins: bool) -> None:
        """The capture of a CUDA graph begins or has ended."""
        self.paused, self._started = begins, False
        self._append((StepTracker.step_abandoned, 0, ()))
        self.catch_up()  # Releases the step's CUDA events now, not during the capture.
        self._clock.set_capturing(begins)

    # ------------------------------------------------------------------ inside an outer backward

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
        if not self._in_backward:
            self._adopt_outer_backward(forwards[0].began)
        self._forward_trained = not self.trains_in_eval
        for forward in forwards:
            self._trainable.add(forward.module)
            facts = forward.module, forward.size, forward.repeats
            self._record(StepTracker.nested_forward_began, forward.began, *facts)
        if not forwards[-1].repeats:
            self._record(StepTracker.nested_backward_began, now)

    def _nested_backward_ended(self) -> None:
        is_pass, reduced = self._nested.backward_ended()
        if reduced:
            self._read_counters()
        if is_pass or reduced:
            self._append((StepTracker.nested_backward_ended, self._now(), (is_pass,)))

    def _adopt_outer_backward(self, began: Stamp) -> None:
        """Record the running outer backward, which began before training did or without torch's function."""
        thread, self._backward_thread = self._backward_thread or get_ident(), 0
        if self._thread not in (0, thread):
            self.training_interrupted()
        self._thread = thread
        self._started = self._in_backward = True
        self._record(StepTracker.backward_began, began)
        Variable._execution_engine.queue_callback(self._adopted_backward_ended)

    @never_raises
    def _adopted_backward_ended(self) -> None:
        if self._in_backward:
            self.backward_ended()

    # ------------------------------------------------------------------ on any thread

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way and its end will be reported."""
        return self._in_backward

    @property
    def thread(self) -> int:
        """Identifier of the training thread; the main thread until another one trains."""
        return self._thread or main_thread().ident or 0

    @property
    def awaits_forward(self) -> bool:
        """Whether the training thread is between the end of a step, or of a micro-step, and the next forward."""
        return self.slots[_PHASE] == OTHER and (self._optimized or not self._reduced_open_step)

    def count_gaps_as_data(self, counts: bool) -> None:
        """Count the time before each training forward as the data phase: a batch is asked of an iterator there."""
        self._tracker.gap_is_data = counts

    @property
    def waits_in(self) -> str:
        """Name of the call in which the training thread waits for other ranks, outside of the reducer; or empty."""
        if self.waits_for_store or not self._in_collective_wait:
            return self.waits_for_store
        return f"{self._message} of a message" if self._message else self.last_collective

    @property
    def last_event_ns(self) -> int:
        """Host time of the last replayed event; 0 if the stamps are a device's."""
        stamp = self._tracker.stamp
        return stamp if type(stamp) is int else 0

    @property
    def trains_here(self) -> bool:
        """Whether the calling thread is the training thread."""
        return get_ident() == self._thread

    @property
    def phase(self) -> int:
        """Current phase of the training thread, as an index into `wire.PHASES`."""
        self._replay(_WAIT_S)
        return self._tracker.phase

    @property
    def number(self) -> int:
        """Number of the open step, or of the next one."""
        self._replay(_WAIT_S)
        return self._tracker.number

    def catch_up(self, wait_s: float = _WAIT_S) -> None:
        """Replay the entries since the last replay; wait at most `wait_s` for another thread's replay."""
        self._replay(wait_s, lambda: self._on_caught_up(*self._tracker.tail()))

    def _replay(self, wait_s: float, then: Callable[[], object] = lambda: None) -> None:
        if not self._replaying.acquire(timeout=wait_s):
            return
        entries, tracker = self._entries, self._tracker
        try:
            while entries:
                event, stamp, facts = entries.popleft(), entries.popleft(), entries.popleft()
                self.entries += 1
                if stamp:  # 0 if the stamp could not be taken: the previous one stays.
                    tracker.stamp = stamp
                try:
                    event(tracker, *facts)
                except Exception:
                    self.log_failure(event)
            self._store_step()
            then()
        finally:
            self._replaying.release()

    def _store_step(self) -> None:
        """Store the open step's number into the place, unless the training thread has recorded more meanwhile."""
        slots = self.slots
        slots[Slot.ALIVE_NS] = monotonic_ns()
        number, closed = self._tracker.number, slots[_CLOSED]
        if not self._entries:
            slots[Slot.STEP], slots[Slot.CLOSED_AT_STEP] = number, closed

    @never_raises
    def finish(self) -> None:
        """Close the open step if it synchronised anything, at the end of training."""
        if self._started:
            self._append((StepTracker.training_finished, self._now(), ()))
        self.catch_up()

    def _record(self, event: Callable[..., None], stamp: Stamp, *facts: Any) -> None:
        """Append an entry; beyond `most` entries, replay them here.

        The end of a call is appended directly instead, which saves a function call.

        Args:
            event: Method of the tracker.
            stamp: Its stamp; 0 if the event has no stamp, or its own ones among the facts.
            *facts: Arguments of the method.
        """
        self._append((event, stamp, facts))
        if len(self._entries) > self._full:
            self._shed_entries()

    def _enter(self, phase: int) -> None:
        """Store phase and time into the place."""
        slots = self.slots
        slots[_PHASE], slots[_AT_NS] = phase, monotonic_ns()

    def _leave_backward(self) -> None:
        """Store the end of a backward into the place, and count it if it was synchronised."""
        if self._reduced_in_backward:
            self._reduced_in_backward = False
            self.slots[_SYNCHRONISED] += 1
            self._read_counters()
        self._enter(OPTIMIZER if self._optimizers else OTHER)

    def _read_counters(self) -> None:
        """Record the counters at the end of a synchronised backward."""
        if self._counters is not None:
            self._append((StepTracker.counters_read, 0, self._counters.read()))

    def _close_place_step(self) -> None:
        self._reduced_open_step = False
        self.slots[_CLOSED] += 1

    def _use_slots(self, slots: Slots) -> None:
        self.slots, self.last_bucket = slots, slots[Slot.BUCKET : Slot.BUCKET + 1]

    def _reset_entries(self) -> None:
        """Begin with an empty queue."""
        self._entries: deque[Any] = deque()
        self._append = self._entries.extend

    def _shed_entries(self) -> None:
        self.catch_up(0)
        if len(self._entries) > _ENTRY_FIELDS * _MAX_BACKLOG:
            self._reset_entries()

    def log_failure(self, call: Callable[..., object]) -> None:
        """Log the first error in telemetry; called while it is handled."""
        if not self._failure_logged:
            self._failure_logged = True
            _log.exception("ddpobs: telemetry failed in %s; training goes on", call.__qualname__)

    @never_raises
    def _call_backward_end(self) -> None:
        for callback in tuple(self.on_backward_end):  # A module that is collected meanwhile removes its callback.
            callback()

    def _detect_failed_optimizer(self) -> None:
        """Detect an optimizer's step that an error ended: torch only reports its begin."""
        if not self.optimizer_is_running():
            self._optimizers = 0
            self._append((StepTracker.optimizer_failed, self._now(), ()))

    def _confirm_in_backward(self) -> bool:
        """Return whether a backward is really under way: an interrupt may have prevented the report of its end."""
        if self._in_backward and self._is_training_thread() and torch._C._current_graph_task_id() < 0:
            self._in_backward = False
            self._nested.forget()
        return self._in_backward

    def _is_evaluating(self) -> bool:
        return not self.trains_in_eval and bool(self.evaluating())

    def _is_training_thread(self) -> bool:
        """Whether this is the training thread. Callers of every step compare the id first, to save this call."""
        thread = get_ident()
        if not self._thread and thread == main_thread().ident:
            self._thread = thread
        return thread == self._thread

    def _training_thread_moved(self) -> bool:
        """Whether this thread, which called the latest forward, trains from now on."""
        if self._other_thread_forward is None or self._other_thread_forward[0] != get_ident():
            return False
        (self._thread, training, began, module, size), self._other_thread_forward = self._other_thread_forward, None
        self.training_interrupted()
        if training:
            self._forward_trained = not self.trains_in_eval
            self._record(StepTracker.forward_began, began, module, True, *size)
        return True

    def _reset_after_fork(self) -> None:
        """Begin anew in a forked child (a loader worker): the entries, and the lock's holder, are the parent's.

        The entries are kept. A process that drops another process's CUDA events is terminated.
        """
        self._replaying = Lock()
        self._parent_entries = self._entries
        self._reset_entries()
        self._use_slots(memory_slots())
        if self._counters is not None:
            self._counters.reset()
        self._started = False


_journals: WeakSet[Journal] = WeakSet()


def _reset_in_child() -> None:
    for journal in list(_journals):
        journal._reset_after_fork()


os.register_at_fork(after_in_child=_reset_in_child)
