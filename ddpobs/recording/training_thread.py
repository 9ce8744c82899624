"""The training thread: which one it is, and what it is inside of."""

from __future__ import annotations

from threading import get_ident, main_thread
from typing import NamedTuple

import torch

from ddpobs.clocks import Stamp
from ddpobs.steps.raw_step import InputSize


class OtherForward(NamedTuple):
    """A forward with gradients on another thread: if a backward follows it there, training has moved.

    Attributes:
        thread: Identifier of that thread.
        training: The module was in training mode.
        began: Stamp of the call.
        module: Index of the DDP module.
        size: Size of its input.
    """

    thread: int
    training: bool
    began: Stamp
    module: int
    size: InputSize


class TrainingThread:
    """The thread that trains: the main thread, or the one that called the latest training forward.

    Attributes:
        ident: Its identifier; 0 until it has trained.
        started: It recorded an event of training since the start, or since the last capture of a graph.
        paused: A CUDA graph is being captured: nothing runs, and times are meaningless.
        in_backward: A backward is under way and its end will be reported.
        other_forward: Latest forward of another thread.
        unrecorded_backward: Thread of the latest outermost backward that was not recorded.
    """

    def __init__(self) -> None:
        self.ident = self.unrecorded_backward = 0
        self.started = self.paused = self.in_backward = False
        self.other_forward: OtherForward | None = None

    @property
    def ident_or_main(self) -> int:
        """Its identifier; that of the main thread until another one trains."""
        return self.ident or main_thread().ident or 0

    @property
    def is_here(self) -> bool:
        """Whether the calling thread has trained."""
        return get_ident() == self.ident

    def is_current(self) -> bool:
        """Whether the calling thread trains. Callers of every step compare the identifier first, to save this call."""
        thread = get_ident()
        if not self.ident and thread == main_thread().ident:
            self.ident = thread
        return thread == self.ident

    def is_elsewhere(self) -> bool:
        """Whether another thread than the calling one has trained."""
        return bool(self.ident) and self.ident != get_ident()

    def moves_here(self) -> OtherForward | None:
        """Take the calling thread, which called the latest forward, as the one that trains; return that forward."""
        forward = self.other_forward
        if forward is None or forward.thread != get_ident():
            return None
        self.ident, self.other_forward = forward.thread, None
        return forward

    def take_unrecorded_backward(self) -> bool:
        """Take the thread of the running outermost backward as the one that trains; return whether it was another."""
        thread, self.unrecorded_backward = self.unrecorded_backward or get_ident(), 0
        moved = self.ident not in {0, thread}
        self.ident = thread
        return moved

    def left_backward(self) -> bool:
        """Whether no backward is under way although its end was not reported: an interrupt may prevent the report."""
        return self.in_backward and self.is_current() and torch._C._current_graph_task_id() < 0
