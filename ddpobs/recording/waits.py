"""Waits of the training thread outside of the reducer: for collectives, for the rendezvous store, for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from threading import enumerate as enumerate_threads
from threading import get_ident, main_thread
from time import monotonic_ns
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from ddpobs.clocks import Clock, Stamp
from ddpobs.never_raises import never_raises
from ddpobs.observers import OwnWait
from ddpobs.recording.entries import Entries
from ddpobs.recording.training_thread import TrainingThread
from ddpobs.steps.account import StartUpWaits
from ddpobs.steps.step_tracker import StepTracker
from ddpobs.torch_seam.collectives import group_text, message_kind
from ddpobs.wire import COMM_KINDS

_USER = COMM_KINDS.index("user")
_BARRIERS = frozenset({"barrier", "monitored_barrier"})


class _StartUpWait(NamedTuple):
    """A wait before training, by the monotonic clock."""

    began_ns: int


class _OwnedWait(NamedTuple):
    """A wait for a collective of a door."""

    wait: OwnWait


class Waits:
    """Records the waits of the user's calls.

    Args:
        clock: Source of stamps.
        entries: Takes the events.
        thread: The training thread; waits of other threads are not recorded.

    Attributes:
        collectives: Collectives of user code that have begun.
        collective_elements: Elements that user code has handed to collectives.
        reduced_elements: Those of all-reduces over all ranks among them.
        last_collective: Name of the user's collective that began last. These four are the training thread's alone.
        on_exchange: Called at a fetch or a forward if user code has handed over elements since the last one.
        interruptions: Evaluations and checkpoints so far: time around them is no part of a step.
        start_up: Waits of the main thread for collectives before the first event of training.
        own: Takes the waits for a door's own collectives, which are not the user's; None outside of these.
        place: Returns the place in the code that the calling thread is at.
    """

    def __init__(self, clock: Clock, entries: Entries, thread: TrainingThread) -> None:
        self._now, self._entries, self._thread = clock.now, entries, thread
        self._in_collective = False
        self._message = ""
        """Kind of the message that is waited for, or was last; empty for a collective."""
        self._at_store = ""
        """Name of the call that waits at the rendezvous store; empty outside of such calls."""
        self.own: OwnWait | None = None
        self._saves = 0
        """Saves of checkpoints under way, one inside another."""
        self.start_up = StartUpWaits()
        self.place: Callable[[], str] = str
        self.collectives = self.collective_elements = self.reduced_elements = self.interruptions = 0
        self.on_exchange: Callable[[], object] = lambda: None
        self._looked_elements = 0
        self.last_collective = ""
        self._called_elsewhere: dict[int, str] = {}
        """Name and group of the collective that each other thread called last, by its identifier."""
        self._waits_elsewhere: dict[int, str] = {}
        """The same of the threads that wait for theirs."""

    @property
    def name(self) -> str:
        """Name of the call in which the training thread waits for other ranks; empty outside of such calls."""
        if self._at_store or not self._in_collective:
            return self._at_store
        return f"{self._message} of a message" if self._message else self.last_collective

    @property
    def elsewhere(self) -> list[str]:
        """Waits of other threads for collectives, such as `all_reduce of the default group in thread writer`."""
        waits = dict(self._waits_elsewhere)
        names = {thread.ident: thread.name for thread in enumerate_threads()} if waits else {}
        return sorted(f"{name} in thread {names.get(ident, ident)}" for ident, name in waits.items())

    def comm_ended(self, module: int, kind: int, launched: Stamp, done: Stamp) -> None:
        """Communication other than a gradient bucket ended in the open step."""
        if not self._thread.paused:
            self._entries.record(StepTracker.comm_ended, 0, module, kind, launched, done)

    def collective_began(self, name: str, group: ProcessGroup) -> None:
        """A collective was called on a group: one of user code, unless a door launches its own."""
        if self.own is not None:
            return
        if self._is_elsewhere():
            self._called_elsewhere[get_ident()] = f"{name} of {group_text(group)}"
            return
        self.collectives += 1
        self.last_collective = name

    def look_for_exchange(self) -> None:
        """Between two steps: call `on_exchange` if user code has moved data."""
        if self._looked_elements != self.collective_elements:
            self._looked_elements = self.collective_elements
            self.on_exchange()

    @never_raises
    def collective_wait_began(self, in_graph: bool = False, work: object = None) -> Stamp | _OwnedWait | None:
        """A wait for a collective, or for a message, begins; None if it does not block the training thread.

        Args:
            in_graph: A node of a backward waits, maybe on one of autograd's threads.
            work: The work that is waited for, if there is one.
        """
        thread = self._thread
        if self.own is not None:
            self.own.wait_began()
            return _OwnedWait(self.own)
        if self._is_start_up() and not self._in_collective:
            self._message, self._in_collective = "", True
            return _StartUpWait(monotonic_ns())
        if (
            thread.paused
            or not thread.started
            or self._in_collective
            or not (thread.is_current() or (thread.in_backward and in_graph))
        ):
            return None
        self._message = message_kind(work)
        self._in_collective = True
        return self._now()

    @never_raises
    def collective_wait_ended(self, began: Stamp | _OwnedWait | None) -> None:
        """The wait ended; `began` is None if it is not to be recorded."""
        if isinstance(began, _OwnedWait):
            began.wait.wait_ended()
            return
        self._in_collective = False
        if began is None:
            return
        if isinstance(began, _StartUpWait):
            self.start_up.add(
                monotonic_ns() - began.began_ns, f"{self.last_collective} at {place}" if (place := self.place()) else ""
            )
        elif self._message:
            self.comm_ended(0, COMM_KINDS.index(self._message), began, self._now())
        elif self.last_collective in _BARRIERS and not (self._saves or self._thread.in_backward):
            self._entries.record(StepTracker.waited_at_barrier, 0, began, self._now())
        else:
            self.comm_ended(0, _USER, began, self._now())

    def _is_start_up(self) -> bool:
        """Whether the calling thread is the main thread, and training has not begun."""
        thread = self._thread
        return not (thread.started or thread.paused) and get_ident() == main_thread().ident

    def began_elsewhere(self) -> bool:
        """Another thread than training's begins to wait for a collective; return whether it is another one."""
        if not self._is_elsewhere():
            return False
        self._waits_elsewhere[get_ident()] = self._called_elsewhere.get(get_ident(), "a collective")
        return True

    def ended_elsewhere(self) -> None:
        """The wait of this thread ended."""
        self._waits_elsewhere.pop(get_ident(), None)

    def _is_elsewhere(self) -> bool:
        """Whether another thread trains; autograd's threads belong to the training."""
        return self._thread.is_elsewhere() and torch._C._current_graph_task_id() < 0

    @never_raises
    def store_wait_began(self, name: str) -> bool:
        """A call may wait at the rendezvous store; return whether it blocks the training thread."""
        if self._at_store or not self._thread.is_current():
            return False
        self._at_store = name
        return True

    def store_wait_ended(self) -> None:
        """The store answered, or an error ended the call."""
        self._at_store = ""

    def training_interrupted(self) -> None:
        """Work outside of training takes time."""
        self.interruptions += 1
        self._entries.record(StepTracker.training_interrupted, 0)

    @never_raises
    def save_began(self) -> bool:
        """A checkpoint is being saved; return whether its end must be reported."""
        if self._thread.paused or not (self._thread.started and self._thread.is_current()):
            self.training_interrupted()
            return False
        self._saves += 1
        self.interruptions += 1
        if self._saves == 1:
            self._entries.record(StepTracker.save_began, self._now())
        return True

    @never_raises
    def save_ended(self) -> None:
        """The checkpoint is saved, or an error ended it."""
        self._saves = max(0, self._saves - 1)
        if not self._saves:
            self._entries.record(StepTracker.save_ended, self._now())
