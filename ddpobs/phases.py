"""Where a step begins and ends, and what the training thread was doing in between.

The tracker only notes *switches*: (phase, stamp) pairs, one list append each. Durations come later, on the telemetry
thread (`summary.Summariser`). It learns of the loader, of backward and of optimizers from process-wide hooks, so the
user's code stays as it is; of forward from the DDP module.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ddpobs.clocks import Clock, Stamp
from ddpobs.wire import PHASES

_log = logging.getLogger("ddpobs")
_P = ParamSpec("_P")
_T = TypeVar("_T")
DATA, FORWARD, BACKWARD, EXPOSED_COMM, OPTIMIZER, OTHER = range(len(PHASES))
_MOST_SWITCHES = 100_000
"""A step in which nothing is ever synchronised begins anew then, after some 10,000 micro-batches."""


def harmless(call: Callable[_P, _T]) -> Callable[_P, _T | None]:
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


@dataclass(slots=True)
class Segment:
    """One synchronisation of gradients: a call of backward, or of a wait of its own.

    Attributes:
        end: Stamp of the call's return.
        records: What its DDP modules recorded (`recorder.Backward`).
        clean: Whether own time may be measured from the previous synchronisation on.
        collective: Sequence number of the synchronised backward in this process.
        waited: Training waited in a call of its own, which the phases tell, and not inside of backward.
    """

    end: Stamp
    records: list[Any]
    clean: bool
    collective: int
    waited: bool = False


@dataclass(slots=True)
class RawStep:
    """A step as the training thread leaves it: stamps only.

    Attributes:
        number: Counts from 0.
        switches: (phase, stamp) in order; the first stamp is the step's start.
        end: Stamp of the step's end.
        segments: Its synchronised backward passes.
        comms: (module, kind, launched, done) of communication that is not a gradient bucket.
        samples: Rows of the inputs' batch dimension, summed over its micro-steps.
        micro_steps: Calls of backward.
    """

    number: int
    switches: list[tuple[int, Stamp]]
    end: Stamp = 0
    segments: list[Segment] = field(default_factory=list)
    comms: list[tuple[int, int, Stamp, Stamp]] = field(default_factory=list)
    samples: int = 0
    micro_steps: int = 0


class StepTracker:
    """Follows the training thread through the phases of its steps.

    Args:
        clock: Where stamps come from.
        finished: Called with each closed `RawStep`, on the training thread; must not block or raise.
    """

    def __init__(self, clock: Clock, finished: Callable[[RawStep], object]) -> None:
        self._clock = clock
        self._now = clock.now
        self._finished = finished
        self._thread = 0
        self._base = OTHER
        self._stack: list[int] = []
        self._number = 0
        self._step: RawStep | None = None
        self._records: list[Any] = []
        self._modules_done: set[int] = set()
        self._optimizer_ran = self._closure_ran = self._optimizer_waits = False
        self._closure_begins: int | None = None
        self._clean = False
        self._collective = -1
        self._backward_depth = 0
        self.modules = 0
        self._blocked = False
        self._evaluated = self._stale = False
        self.paused = False
        """A CUDA graph is being captured: nothing runs, and no time means anything."""
        self.on_backward_end: list[Callable[[], None]] = []
        self.trains_in_eval = False
        """Gradients were reduced last while every module was in evaluation mode: the mode says nothing here."""
        self.evaluating: Callable[[], bool] = lambda: False
        """Whether every module is in evaluation mode."""
        self.stepping: Callable[[], bool] = lambda: True
        """Whether an optimizer's step that was told of is still on the stack."""

    @property
    def phase(self) -> int:
        """What the training thread is doing, as an index into `wire.PHASES`."""
        return self._stack[-1] if self._stack else self._base

    @property
    def number(self) -> int:
        """The open step's number, or the next one's."""
        return self._step.number if self._step else self._number

    @harmless
    def forward_began(self, module: int, training: bool, samples: int) -> None:
        """A DDP module's forward was called."""
        if self._backward_depth or self.paused:
            return  # Checkpointing runs it again, inside backward.
        if not training:
            self._clean = False
            if self._evaluating():
                self._evaluated = self._stale = True
                if self._step and self._step.segments:
                    self._close()
            return
        self._thread = self._thread or threading.get_ident()
        if self._optimizer_waits:
            self._optimizer_waits = False
            self._open()
            self._enter_optimizer()
        self._leave_failed_optimizer()
        nested = OPTIMIZER in self._stack
        done = self._step and self._step.segments and (self._optimizer_ran or module in self._modules_done)
        if done and not nested:
            self._close()
        elif self._closure_begins is not None:
            self._close(self._closure_begins)
        step = self._open()
        if self._stale:
            self._begin_anew(step)
        self._evaluated = False
        step.samples += samples
        if nested and self._stack[-1] == OPTIMIZER:
            self._push(FORWARD)
            return
        self._base = FORWARD
        self._switch()

    @harmless
    def fetch_began(self) -> bool:
        """The loader was asked for a batch; returns whether it is this tracker's thread that asked."""
        if self.paused or not self._mine():
            return False
        if self._step and self._step.segments:
            self._close()
        step = self._open()
        self._leave_failed_optimizer()
        if self._evaluating():
            self._clean, self._evaluated = False, True
        if self._evaluated and not self._stack:
            self._begin_anew(step)
        self._base = OTHER
        self._push(DATA)
        return True

    @harmless
    def optimizer_began(self) -> None:
        """An optimizer's step was called."""
        if not self._mine():
            return
        self._optimizer_waits = self._step is None  # Whether it has a closure, in which the first step begins.
        if self._step:
            self._leave_failed_optimizer()
            self._enter_optimizer()

    @harmless
    def optimizer_ended(self) -> None:
        """It returned."""
        if not self._mine():
            return
        self._optimizer_waits = False
        if not self._step:
            return
        if self._stack.count(OPTIMIZER) == 1:
            self._closure_begins = None
        self._leave_forward()
        if self._stack and self._stack[-1] == OPTIMIZER:
            self.pop()

    @harmless
    def backward_began(self) -> bool:
        """`torch.autograd.backward` was called; False for a nested call (reentrant checkpointing) or a foreign one."""
        if not self._mine() or self._backward_depth or self.paused:
            return False
        if self._step is None:
            if not self._evaluating():
                return False
            self._open()  # The first one that is trained in evaluation mode.
        self._backward_depth = 1
        self._leave_forward()
        self._base = OTHER
        self._push(BACKWARD)
        return True

    @harmless
    def backward_ended(self) -> None:
        """The outermost backward returned or raised."""
        self._backward_depth = 0
        for told in tuple(self.on_backward_end):  # One may be collected meanwhile, and go.
            told()
        self.pop()
        if self._step is None:
            return
        self._step.micro_steps += 1
        self._close_segment(self._step)

    @harmless
    def waiting_began(self) -> bool:
        """Training waits for gradients in a call of its own, as before an optimizer's step; False if not noted."""
        if self.paused or not self._mine() or self._backward_depth:
            return False
        self._leave_forward()
        self._open()
        self._push(EXPOSED_COMM)
        return True

    @harmless
    def waiting_ended(self) -> None:
        """They are there, or an error ended the wait."""
        self.pop()
        if self._step is not None:
            self._close_segment(self._step, waited=True)

    @harmless
    def synchronised(self, module: int, record: Any) -> None:
        """A DDP module's gradients were reduced in the backward that is under way."""
        if self._step is None:
            return
        self._records.append(record)
        self._modules_done.add(module)
        evaluating = self.evaluating()
        if evaluating and not self.trains_in_eval:
            self._evaluated = self._stale = False
        self.trains_in_eval = evaluating

    @harmless
    def communicated(self, module: int, kind: int, launched: Stamp, done: Stamp) -> None:
        """Other communication took place in the open step."""
        if self._step is not None:
            self._step.comms.append((module, kind, launched, done))

    @harmless
    def blocking_began(self, in_graph: bool = False) -> Stamp | None:
        """Somebody is about to wait for a collective; None where it is not this tracker's business.

        Args:
            in_graph: It is a node of a backward that waits: autograd has threads of its own.
        """
        if self._step is None or self._blocked or not (self._mine() or (self._backward_depth and in_graph)):
            return None
        self._blocked = True
        return self._now()

    @harmless
    def blocking_ended(self, module: int, kind: int, began: Stamp) -> None:
        """The wait is over."""
        self._blocked = False
        self.communicated(module, kind, began, self._now())

    @harmless
    def shadowed(self) -> None:
        """This rank only took part in a synchronised backward of the others, and waited for them unnoted."""
        self._collective += 1
        self._clean = False

    @harmless
    def disturbed(self) -> None:
        """Something that is no part of training took time (a checkpoint): own time has no clean start."""
        self._clean = False

    @harmless
    def pause(self, begins: bool) -> None:
        """The capture of a CUDA graph begins, which ends the open step without a result, or it has ended."""
        if begins:
            self._number = self.number
            self._step, self._stack, self._base = None, [], OTHER
            self._records, self._closure_ran, self._closure_begins = [], False, None
            self._modules_done.clear()
        self.paused, self._clean = begins, False
        self._clock.capturing(begins)

    @harmless
    def finish(self) -> None:
        """Close the open step if it synchronised anything, at the end of training."""
        if self._step and self._step.segments:
            self._close()

    @harmless
    def pop(self) -> None:
        """Leave the innermost phase."""
        if self._stack:  # A pause forgets them.
            self._stack.pop()
        self._switch()

    def _enter_optimizer(self) -> None:
        # Where closures did the step so far, the next one that trains is the next step's, from its optimizer's call on.
        if self._closure_ran and self._step and OPTIMIZER not in self._stack:
            self._closure_begins = len(self._step.switches)
        self._optimizer_ran = True
        self._base = OTHER
        self._push(OPTIMIZER)

    def _leave_failed_optimizer(self) -> None:
        """Torch tells of an optimizer's step that began, and not that an error ended it: then it runs no more."""
        if OPTIMIZER in self._stack and not self._backward_depth and not self.stepping():
            self._stack.clear()
            self._switch()

    def _leave_forward(self) -> None:
        """A forward inside an optimizer's closure lasts until backward is called, or until the optimizer returns."""
        if self._stack and self._stack[-1] == FORWARD:
            self._stack.pop()

    def _close_segment(self, step: RawStep, waited: bool = False) -> None:
        if self._records:
            self._collective += 1
            self._closure_ran = OPTIMIZER in self._stack
            step.segments.append(Segment(step.switches[-1][1], self._records, self._clean, self._collective, waited))
            self._records, self._clean, self._optimizer_ran = [], True, False

    def _begin_anew(self, step: RawStep) -> None:
        """What an evaluation took is no part of a step: it begins at the last fetch before its first forward."""
        self._stale = False
        if not step.micro_steps:
            step.switches, step.comms = [(OTHER, self._now())], []

    def _evaluating(self) -> bool:
        return self.evaluating() and not self.trains_in_eval

    def _mine(self) -> bool:
        thread = threading.get_ident()
        if not self._thread and thread == threading.main_thread().ident:
            self._thread = thread
        return thread == self._thread

    def _push(self, phase: int) -> None:
        self._stack.append(phase)
        self._switch()

    def _switch(self) -> None:
        step = self._step
        if step is None:
            return
        if len(step.switches) >= _MOST_SWITCHES:
            step.switches, step.comms, self._clean = [], [], False
        step.switches.append((self.phase, self._now()))

    def _open(self) -> RawStep:
        if self._step is None:
            self._step = RawStep(self._number, [(OTHER, self._now())])
        return self._step

    def _close(self, place: int | None = None) -> None:
        """The step ends, now or at one of its switches, and the next one begins."""
        step = self._step
        if step is None:
            return
        later = step.switches[place:] if place is not None else []
        del step.switches[len(step.switches) - len(later) :]
        step.end = later[0][1] if later else self._now()
        self._step = RawStep(step.number + 1, [(OTHER, step.end), *later])
        self._modules_done.clear()
        self._optimizer_ran = self._closure_ran = False
        self._closure_begins = None
        self._finished(step)
