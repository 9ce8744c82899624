"""What the training thread notes, in as few stores as possible, and its replay into steps on another thread.

Between two calls of telemetry's a training empties the processor's caches, so that what a call costs is the number of
places it looks at. On the training thread an entry is a stamp and an append. What it means for the step, which took
most of the time, is found out for many entries at once by `catch_up`, in `phases.StepTracker`.

What waits is kept in few objects that can hold others: of these the garbage collector counts those that stay, and when
a quarter more than before have it goes over all that the process has, for some tenths of a second, at another moment on
every rank.

The journal learns of the loader, of backward and of optimizers from process-wide hooks, so that the user's code stays
as it is; of forward from the DDP module.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from functools import wraps
from threading import Lock, get_ident, main_thread
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch

from ddpobs.clocks import Clock, Stamp
from ddpobs.steps.raw_step import RawStep
from ddpobs.steps.step_tracker import StepTracker
from ddpobs.wire import COMM_KINDS

_log = logging.getLogger("ddpobs")
_P = ParamSpec("_P")
_T = TypeVar("_T")
_MOST = 4096
"""Entries, some hundred steps: then the training thread replays them itself. Nothing is lost where nobody else does."""
_MOST_HELD = 16 * _MOST
"""Where a replay hangs, in somebody's finalizer, so many go."""
_PLACES = 3
"""An entry is what happened, when, and its facts, one after another."""
_WAIT_S = 0.1
_USER = COMM_KINDS.index("user")


def never_raises(call: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """The call, with an error in it logged once instead of raised: telemetry never stops a training."""
    told = False

    @wraps(call)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        nonlocal told
        try:
            return call(*args, **kwargs)
        except Exception:
            if not told:
                told = True
                _log.exception("ddpobs: telemetry failed in %s; training goes on", call.__qualname__)
            return None

    return guarded


class Journal:
    """Notes what the training thread goes through; of what another thread calls nothing is noted.

    Args:
        clock: Where stamps come from.
        finished: Called with each closed `RawStep` by whoever replays; must not block.
        most: Entries after which the training thread replays them itself.
        caught_up: Called by whoever replays, once all is replayed; must not raise. It and `finished` are never called
            at the same time.

    Attributes:
        modules: How many DDP modules there are.
        trained: Those of them whose gradients were reduced.
        paused: A CUDA graph is being captured: nothing runs, and no time means anything.
        on_backward_end: Called when the outermost backward has returned.
        trains_in_eval: Gradients were reduced last while every module was in evaluation mode: the mode says nothing
            here.
        evaluating: Tells whether every module is in evaluation mode.
        stepping: Tells whether an optimizer's step that began is still on the stack.
    """

    def __init__(
        self,
        clock: Clock,
        finished: Callable[[RawStep], object],
        most: int = _MOST,
        caught_up: Callable[[], object] = lambda: None,
    ) -> None:
        self._clock, self._caught_up = clock, caught_up
        self._full = _PLACES * min(most, _MOST)
        self._now = clock.now
        self._tracker = StepTracker(finished)
        self._replaying = Lock()
        self._await_entries()
        self._thread = 0
        self._other_thread_forward: tuple[int, bool, Stamp, int, int] | None = None
        """Another thread's latest forward with gradients: which thread, whether to train, when, module, samples."""
        self._begun = False
        self._in_backward = self._waiting = False
        self._learns: set[int] = set()
        self._blocked = False
        self._optimizers = 0
        self._trained = self._told = False
        self.modules = 0
        self.trained: set[int] = set()
        self.paused = False
        self.on_backward_end: list[Callable[[], None]] = []
        self.trains_in_eval = False
        self.evaluating: Callable[[], bool | None] = lambda: False
        self.stepping: Callable[[], bool | None] = lambda: True
        _journals.add(self)

    # ------------------------------------------------------------------ on the training thread

    def forward_began(self, module: int, training: bool, samples: int) -> None:
        """A DDP module's forward was called."""
        if self.paused or (self._in_backward and self._backward_goes_on()):
            return  # Checkpointing runs it again, inside backward.
        if self._thread and self._thread != get_ident():
            if not torch.is_grad_enabled():
                return  # Somebody asks a model beside training.
            if self.trained:
                self._other_thread_forward = get_ident(), training, self._now(), module, samples
                return  # Training moved there if a backward follows.
        if not training:
            self._trained, evaluates = False, self._evaluates()
            if evaluates or self.modules == 1 or self.trains_in_eval or module in self._learns:
                self._note(StepTracker.evaluation_began, self._now(), evaluates)
            return  # Or it is a teacher of one that is trained, and part of the step.
        if module not in self._learns and torch.is_grad_enabled():
            self._learns.add(module)
        self._thread = get_ident()
        self._begun, self._trained = True, not self.trains_in_eval
        if self._optimizers:
            self._look_for_failed_optimizer()
        self._note(StepTracker.forward_began, self._now(), module, samples, torch.is_grad_enabled())

    def fetch_began(self, loader: int = 0) -> bool:
        """A loader, by any number of its own, was asked for a batch; whether it is the training thread that asked."""
        if self.paused or (get_ident() != self._thread and not self._is_training_thread()):
            return False
        self._begun = True
        if self._optimizers:
            self._look_for_failed_optimizer()
        # Some validate with the model left in training mode.
        self._note(StepTracker.fetch_began, self._now(), torch.is_grad_enabled(), self._evaluates(), loader)
        return True

    def fetch_ended(self) -> None:
        """It gave one, or had none."""
        self._append((StepTracker.fetch_ended, self._now(), ()))

    def optimizer_began(self, *_: object) -> None:
        """An optimizer's step was called."""
        if get_ident() == self._thread or self._is_training_thread():
            self._optimizers += 1
            self._note(StepTracker.optimizer_began, self._now())

    def optimizer_ended(self, *_: object) -> None:
        """It returned."""
        if get_ident() == self._thread or self._is_training_thread():
            if self._optimizers:
                self._optimizers -= 1
            self._append((StepTracker.optimizer_ended, self._now(), ()))

    def backward_began(self) -> bool:
        """`torch.autograd.backward` was called; False for a nested call (reentrant checkpointing) or a foreign one."""
        if self.paused or (self._in_backward and self._backward_goes_on()):
            return False
        if get_ident() != self._thread and not (self._is_training_thread() or self._training_thread_moved()):
            return False
        if not self._begun and not self._evaluates():  # The first one that is trained in evaluation mode begins a step.
            return False
        self._begun = self._in_backward = True
        self._note(StepTracker.backward_began, self._now())
        return True

    def backward_ended(self, raised: bool = False) -> None:
        """The outermost backward returned or raised."""
        if self.on_backward_end and not raised:
            self._tell_backward_ended()
        self._in_backward = False
        self._append((StepTracker.backward_ended, self._now(), ()))

    def waiting_began(self) -> bool:
        """Training waits for gradients in a call of its own, as before an optimizer's step; False if not noted."""
        if self.paused or self._in_backward or not self._is_training_thread():
            return False
        self._begun = self._waiting = True
        self._note(StepTracker.waiting_began, self._now())
        return True

    def waiting_ended(self) -> None:
        """They are there, or an error ended the wait."""
        self._waiting = False
        self._append((StepTracker.waiting_ended, self._now(), ()))

    def synchronised(self, module: int, record: Any) -> None:
        """A DDP module's gradients were reduced in the backward that is under way."""
        if not self._begun:
            self.shadowed()  # Of a step that a graph's capture left out; the other ranks may have had none.
            return
        self.trained.add(module)
        evaluating = not self._trained and bool(self.evaluating())
        self._append((StepTracker.gradients_reduced, 0, (module, record, evaluating and not self.trains_in_eval)))
        self.trains_in_eval = evaluating
        if not (self._in_backward or self._waiting):
            self._append((StepTracker.engine_backward_ended, self._now(), ()))

    def communicated(self, module: int, kind: int, launched: Stamp, done: Stamp) -> None:
        """Other communication took place in the open step."""
        self._note(StepTracker.comm_ended, 0, module, kind, launched, done)

    @never_raises
    def collective_wait_began(self, in_graph: bool = False) -> Stamp | None:
        """Somebody is about to wait for a collective; None where it is not the training thread's business.

        Args:
            in_graph: It is a node of a backward that waits: autograd has threads of its own.
        """
        if not self._begun or self._blocked or not (self._is_training_thread() or (self._in_backward and in_graph)):
            return None
        self._blocked = True
        return self._now()

    @never_raises
    def collective_wait_ended(self, began: Stamp | None) -> None:
        """The wait is over; None where there was none to be noted after all."""
        self._blocked = False
        if began is not None:
            self.communicated(0, _USER, began, self._now())

    def shadowed(self) -> None:
        """This rank took part in a synchronised backward of the others that is no step of its own."""
        self._note(StepTracker.zeros_contributed, 0)

    def disturbed(self) -> None:
        """Something that is no part of training took time (a checkpoint)."""
        self._note(StepTracker.training_interrupted, 0)

    @never_raises
    def pause(self, begins: bool) -> None:
        """The capture of a CUDA graph begins or has ended."""
        self.paused, self._begun = begins, False
        self._append((StepTracker.step_abandoned, 0, ()))
        self.catch_up()  # What the step held of the device goes now, and not in mid-capture.
        self._clock.set_capturing(begins)

    # ------------------------------------------------------------------ on any thread

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way whose end will be told."""
        return self._in_backward

    @property
    def phase(self) -> int:
        """What the training thread is doing, as an index into `wire.PHASES`."""
        self._replay(_WAIT_S)
        return self._tracker.phase

    @property
    def number(self) -> int:
        """The open step's number, or the next one's."""
        self._replay(_WAIT_S)
        return self._tracker.number

    def catch_up(self, wait_s: float = _WAIT_S) -> None:
        """Replay what was noted since the last time; wait so long for another thread that is at it."""
        self._replay(wait_s, self._caught_up)

    def _replay(self, wait_s: float, then: Callable[[], object] = lambda: None) -> None:
        if not self._replaying.acquire(timeout=wait_s):
            return
        entries, tracker = self._entries, self._tracker
        try:
            while entries:
                happened, at, facts = entries.popleft(), entries.popleft(), entries.popleft()
                if at:  # Or it could not be taken.
                    tracker.at = at
                try:
                    happened(tracker, *facts)
                except Exception:
                    self.failed(happened)
            then()
        finally:
            self._replaying.release()

    @never_raises
    def finish(self) -> None:
        """Close the open step if it synchronised anything, at the end of training."""
        if self._begun:
            self._append((StepTracker.training_finished, self._now(), ()))
        self.catch_up()

    def _note(self, happened: Callable[..., None], at: Stamp, *facts: Any) -> None:
        """What happened and when, 0 for what has times of its own or none; more than `most` are replayed here.

        What only ends something that began is appended without a call.
        """
        self._append((happened, at, facts))
        if len(self._entries) > self._full:
            self._relieve()

    def _await_entries(self) -> None:
        """Begin with none."""
        self._entries: deque[Any] = deque()
        self._append = self._entries.extend

    def _relieve(self) -> None:
        self.catch_up(0)
        if len(self._entries) > _PLACES * _MOST_HELD:
            self._await_entries()

    def failed(self, what: Callable[..., object]) -> None:
        """An error in telemetry is told once and goes no further; called while it is handled."""
        if not self._told:
            self._told = True
            _log.exception("ddpobs: telemetry failed in %s; training goes on", what.__qualname__)

    @never_raises
    def _tell_backward_ended(self) -> None:
        for told in tuple(self.on_backward_end):  # One may be collected meanwhile, and go.
            told()

    def _look_for_failed_optimizer(self) -> None:
        """Torch tells of an optimizer's step that began, and not that an error ended it."""
        if not self.stepping():
            self._optimizers = 0
            self._append((StepTracker.optimizer_failed, self._now(), ()))

    def _backward_goes_on(self) -> bool:
        """Whether this is inside of a backward; an interrupt may have come before the end of one could be told."""
        if self._in_backward and self._is_training_thread() and torch._C._current_graph_task_id() < 0:
            self._in_backward = False
        return self._in_backward

    def _evaluates(self) -> bool:
        return not self.trains_in_eval and bool(self.evaluating())

    def _is_training_thread(self) -> bool:
        """Whether this is the training thread; what comes every step looks for itself first, and calls nothing."""
        thread = get_ident()
        if not self._thread and thread == main_thread().ident:
            self._thread = thread
        return thread == self._thread

    def _training_thread_moved(self) -> bool:
        """Whether this thread, which called a forward, does the training from now on."""
        if self._other_thread_forward is None or self._other_thread_forward[0] != get_ident():
            return False
        (self._thread, training, began, module, samples), self._other_thread_forward = self._other_thread_forward, None
        self.disturbed()
        if training:
            self._trained = not self.trains_in_eval
            self._note(StepTracker.forward_began, began, module, samples, True)
        return True

    def _forget(self) -> None:
        """In a forked child (a loader worker): the entries are the parent's, and so may be whoever replays them.

        They are kept: what they hold of a CUDA device ends a process that drops it and did not make it.
        """
        self._replaying = Lock()
        self._parents = self._entries
        self._await_entries()
        self._begun = False


_journals: WeakSet[Journal] = WeakSet()


def _forget_in_child() -> None:
    for journal in list(_journals):
        journal._forget()


os.register_at_fork(after_in_child=_forget_in_child)
