"""Where a step begins and ends, and what the training thread was doing in between.

The tracker is told what happened and when, in order, by the journal's replay (`journal.py`). It only keeps *switches*:
(phase, stamp) pairs. Durations come later (`summary.Summariser`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddpobs.clocks import Stamp
from ddpobs.wire import COMM_KINDS, PHASES

DATA, FORWARD, BACKWARD, EXPOSED_COMM, OPTIMIZER, OTHER = range(len(PHASES))
NO_STEP = -1
"""What lies between steps."""
_UNUSED_MAP = COMM_KINDS.index("unused_map")
_MOST_SWITCHES = 100_000
"""A step in which nothing is ever synchronised begins anew then, after some 10,000 micro-batches."""
_MOST_COMMS = 50_000
"""More collectives of one step are not told: a batch of 100,000 records is refused."""
_HABIT = 8
"""After so many steps in a row with forwards without gradients that no batch led to, these are part of each step."""


@dataclass(slots=True)
class Segment:
    """One synchronisation of gradients: a call of backward, or of a wait of its own.

    Attributes:
        end: Stamp of the call's return.
        records: What its DDP modules recorded (`recorder.BackwardRecord`).
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
        holes: Places in `switches` where an evaluation began between two of its micro-steps; the next switch ended it.
    """

    number: int
    switches: list[tuple[int, Stamp]]
    end: Stamp = 0
    segments: list[Segment] = field(default_factory=list)
    comms: list[tuple[int, int, Stamp, Stamp]] = field(default_factory=list)
    samples: int = 0
    micro_steps: int = 0
    holes: list[int] = field(default_factory=list)

    @property
    def records(self) -> int:
        """For how many it counts in a batch: itself, bucket spans, other communication, sampled readiness."""
        told = [record for segment in self.segments for record in segment.records]
        sampled = sum(record.parameter_ready_ns is not None for record in told)
        return 1 + len(self.comms) + sum(len(record.ready_ns) for record in told) + sampled


@dataclass(slots=True)
class _Doubtful:
    """What may be an evaluation's: a forward without gradients in mid-step, a fetch without them.

    Attributes:
        step: In which it came.
        at: When.
        place: How many switches, other communication and samples the step had then.
        evaluating: As of the forward; a fetch is.
        loaders: Whose batches came in training mode, only without gradients: the step may fetch one of each.
    """

    step: RawStep
    at: Stamp
    place: tuple[int, int, int]
    evaluating: bool
    loaders: set[int]


class StepTracker:
    """Makes steps of what it is told.

    Args:
        finished: Called with each closed `RawStep`.

    Attributes:
        at: When it happened, what it is told of next.
    """

    def __init__(self, finished: Callable[[RawStep], object]) -> None:
        self._told = finished
        self.at: Stamp = 0
        self._base = OTHER
        self._stack: list[int] = []
        """Phases of the calls that are under way, the innermost last; `_base` is the phase outside of them."""
        self._number = 0
        self._step: RawStep | None = None
        self._records: list[Any] = []
        self._modules_done: set[int] = set()
        self._optimizer_ran = self._closure_ran = self._optimizer_waits = False
        """An optimizer was called: since the last synchronisation; around it, with a closure; before any step began."""
        self._closure_begins: int | None = None
        """The switch at which an optimizer was called whose closure, should it train, is the next step's."""
        self._clean = False
        self._collective = -1
        self._evaluated = self._stale = False
        """An evaluation came after the last forward that trains; and what the step holds so far may be its."""
        self._hole: tuple[int, int, int] | None = None
        """Where an evaluation between two micro-steps began: switches, other communication and samples until then."""
        self._under_way = False
        """Between a fetch or a forward, to train, and backward."""
        self._doubtful: _Doubtful | None = None
        self._evaluates = self._asked = False
        """The last batch was fetched to evaluate; the step has forwards without gradients that no batch led to."""
        self._asked_in_a_row = 0
        self._comms_switched = 0

    @property
    def phase(self) -> int:
        """What the training thread is doing, as an index into `wire.PHASES`."""
        return self._stack[-1] if self._stack else self._base

    @property
    def number(self) -> int:
        """The open step's number, or the next one's."""
        step = self._step  # Another thread may be told meanwhile that it is abandoned.
        return step.number if step else self._number

    # ------------------------------------------------------------------ what happens, in order

    def forward_began(self, module: int, samples: int, differentiated: bool = True) -> None:
        """A DDP module's forward was called, to train; `differentiated`: backward may follow."""
        if differentiated:
            self._doubtful, self._under_way, self._evaluates = None, True, False
        elif self._doubtful:
            self._doubtful.loaders.clear()
        if self._optimizer_waits:
            self._optimizer_waits = False
            self._open()
            self._enter_optimizer()
        nested = OPTIMIZER in self._stack
        done = self._step and self._step.segments and (self._optimizer_ran or module in self._modules_done)
        if not nested:
            self._stack.clear()  # An interrupt may have come before the end of what is on it could be told.
        if done and not nested:
            self._close()
        elif self._closure_begins is not None:
            self._close(self._closure_begins)
        step = self._open()
        if self._stale:
            self._begin_anew(step)
        self._evaluated, self._hole = False, None
        step.samples += samples
        if nested and self._stack[-1] == OPTIMIZER:
            self._push(FORWARD)
            return
        self._base = FORWARD
        self._switch()

    def evaluation_began(self, evaluating: bool) -> None:
        """A DDP module's forward was called, and not to train; `evaluating`: every module is in evaluation mode.

        After the fetch of a step, or its forward, it may be part of the step: labels that the model gives itself, or
        old probabilities. It is unless another batch is asked for before backward. Beside any batch it is an
        evaluation, unless it comes in every step: a policy that acts, say.
        """
        if self._under_way:
            self._doubt(evaluating)
            return
        self._settle()
        if evaluating and self._step and self._step.segments:
            self._close()
        if not self._evaluates:
            self._asked = True
            if self._asked_in_a_row >= _HABIT:
                return
        self._clean = False
        if evaluating:
            self._evaluated = self._stale = True
            if self._step:
                self._begin_hole(self.at, (len(self._step.switches), len(self._step.comms), self._step.samples))

    def fetch_began(self, differentiated: bool, evaluating: bool, loader: int = 0) -> None:
        """A loader was asked for a batch; `differentiated`: gradients are on; `evaluating`: as of a forward.

        One without gradients, or in evaluation mode, may be trained on: it is an evaluation's where a forward without
        gradients follows, a fetch of another sort, or the same loader's next batch.
        """
        if self._stack and self._stack[-1] == DATA:  # A framework's loader asks torch's.
            self._push(DATA)
            return
        blind = not (differentiated or evaluating)
        loaders = self._doubtful.loaders if blind and self._doubtful else set()
        another = bool(loaders) and loader not in loaders
        if not another:
            self._settle()
        if self._step and self._step.segments:
            self._close()
        step = self._open()
        self._under_way = differentiated and not evaluating
        self._evaluates = not self._under_way
        if self._evaluated and not self._stack and not another:
            self._begin_anew(step)
        if self._evaluates:
            self._doubt(evaluating=True)
        if blind and self._doubtful:
            self._doubtful.loaders.add(loader)
        if self._base != FORWARD:  # Its loss may be to come.
            self._base = OTHER
        self._push(DATA)

    def fetch_ended(self) -> None:
        """It gave one, or had none."""
        self._pop()

    def optimizer_began(self) -> None:
        """An optimizer's step was called."""
        self._optimizer_waits = self._step is None  # Whether it has a closure, in which the first step begins.
        if self._step:
            self._enter_optimizer()

    def optimizer_ended(self) -> None:
        """It returned."""
        self._optimizer_waits = False
        if not self._step:
            return
        if self._stack.count(OPTIMIZER) == 1:
            self._closure_begins = None
        self._leave_forward()
        if self._stack and self._stack[-1] == OPTIMIZER:
            self._pop()

    def optimizer_failed(self) -> None:
        """An error ended those that were under way."""
        self._optimizer_waits = False
        if OPTIMIZER in self._stack:
            self._stack.clear()
            self._switch()

    def backward_began(self) -> None:
        """The outermost `torch.autograd.backward` was called."""
        self._open()
        self._doubtful, self._under_way = None, False
        self._leave_forward()
        self._base = OTHER
        self._push(BACKWARD)

    def backward_ended(self) -> None:
        """It returned or raised."""
        self._pop()
        if self._step is not None:
            self._step.micro_steps += 1
            self._close_segment(self._step)

    def backward_ended_untold(self) -> None:
        """A backward is over that somebody had the engine run without torch's function: it stays part of forward."""
        self._base = OTHER
        self.backward_ended()

    def waiting_began(self) -> None:
        """Training waits for gradients in a call of its own, as before an optimizer's step."""
        self._leave_forward()
        self._open()
        self._push(EXPOSED_COMM)

    def waiting_ended(self) -> None:
        """They are there, or an error ended the wait."""
        self._pop()
        if self._step is not None:
            self._close_segment(self._step, waited=True)

    def synchronised(self, module: int, record: Any, begins_training: bool) -> None:
        """A DDP module's gradients were reduced in the backward that is under way.

        Args:
            module: Which.
            record: What it recorded, a `recorder.BackwardRecord`.
            begins_training: The first one of a training in evaluation mode: what came before was none.
        """
        if self._step is None:
            return
        self._records.append(record)
        self._modules_done.add(module)
        if begins_training:
            self._evaluated = self._stale = False

    def communicated(self, module: int, kind: int, launched: Stamp, done: Stamp) -> None:
        """Other communication took place in the open step."""
        if self._step is None:
            return
        if len(self._step.comms) < _MOST_COMMS:
            self._step.comms.append((module, kind, launched, done))
        else:  # As where a model whose layers run in parallel is asked for hours after its training.
            self._clean = False

    def shadowed(self) -> None:
        """This rank took part in a synchronised backward of the others that is no step of its own."""
        self._collective += 1
        self._clean = False

    def disturbed(self) -> None:
        """Something that is no part of training took time (a checkpoint): own time has no clean start."""
        self._clean = False

    def abandoned(self) -> None:
        """The open step ends without a result: the capture of a CUDA graph begins or has ended."""
        self._number = self.number
        self._step, self._stack, self._base = None, [], OTHER
        self._records, self._closure_ran, self._closure_begins, self._hole = [], False, None, None
        self._doubtful, self._under_way = None, False
        self._modules_done.clear()
        self._clean = False

    def finished(self) -> None:
        """Training is over: the open step counts if it synchronised anything, until its last switch.

        What follows that is no training: an evaluation, an upload, the wait for the exit.
        """
        step = self._step
        if step is None or not step.segments:
            return
        after = step.comms[self._comms_switched :]
        step.comms[self._comms_switched :] = [comm for comm in after if comm[1] == _UNUSED_MAP]  # Told when it is done.
        self._close(max(1, len(step.switches) - 1))

    # ------------------------------------------------------------------ what follows from it

    def _enter_optimizer(self) -> None:
        # Where closures did the step so far, the next one that trains is the next step's, from its optimizer's call on.
        if self._closure_ran and self._step and OPTIMIZER not in self._stack:
            self._closure_begins = len(self._step.switches)
        self._optimizer_ran = True
        self._base = OTHER
        self._push(OPTIMIZER)

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
            self._doubtful, self._under_way = None, False

    def _begin_anew(self, step: RawStep) -> None:
        """What an evaluation took is no part of a step: it begins at the last fetch before its first forward."""
        self._stale = False
        if not step.micro_steps:
            step.switches, step.comms, step.samples = [(OTHER, self.at)], [], 0
        elif self._hole is not None:
            switches, comms, step.samples = self._hole
            del step.switches[switches + 1 :], step.comms[comms:]
            step.switches.append((OTHER, self.at))

    def _doubt(self, evaluating: bool) -> None:
        """Whether this is an evaluation's will show."""
        step = self._step
        if step and self._doubtful is None:
            place = len(step.switches), len(step.comms), step.samples
            self._doubtful = _Doubtful(step, self.at, place, evaluating, set())

    def _settle(self) -> None:
        """What was in doubt was an evaluation's."""
        doubtful, self._doubtful = self._doubtful, None
        if doubtful is None:
            return
        self._clean = False
        if doubtful.evaluating:
            self._evaluated = True
            if doubtful.step is self._step:
                self._begin_hole(doubtful.at, doubtful.place)

    def _begin_hole(self, at: Stamp, place: tuple[int, int, int]) -> None:
        """An evaluation between two micro-steps of one step takes none of its time."""
        step = self._step
        if step and step.micro_steps and self._hole is None:
            self._hole = place
            step.holes.append(place[0])
            step.switches.insert(place[0], (NO_STEP, at))

    def _push(self, phase: int) -> None:
        self._stack.append(phase)
        self._switch()

    def _pop(self) -> None:
        if self._stack:  # What was abandoned left none.
            self._stack.pop()
        self._switch()

    def _switch(self) -> None:
        step = self._step
        if step is None:
            return
        if len(step.switches) >= _MOST_SWITCHES:
            step.switches, step.comms, step.holes, self._hole, self._clean = [], [], [], None, False
            self._doubtful = None
        step.switches.append((self.phase, self.at))
        self._comms_switched = len(step.comms)

    def _open(self) -> RawStep:
        if self._step is None:
            self._step = RawStep(self._number, [(OTHER, self.at)])
        return self._step

    def _close(self, place: int | None = None) -> None:
        """The step ends, now or at one of its switches, and the next one begins."""
        step = self._step
        if step is None:
            return
        later = step.switches[place:] if place is not None else []
        del step.switches[len(step.switches) - len(later) :]
        step.end = later[0][1] if later else self.at
        self._asked_in_a_row = self._asked_in_a_row + 1 if self._asked else 0
        self._asked = False
        self._step = RawStep(step.number + 1, [(OTHER, step.end), *later])
        self._modules_done.clear()
        self._optimizer_ran = self._closure_ran = False
        self._closure_begins = self._hole = self._doubtful = None
        self._told(step)
