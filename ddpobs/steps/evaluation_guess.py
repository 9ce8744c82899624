"""Guess whether a forward or a fetch belongs to the open step or to an evaluation.

Scripts do not mark their evaluations. The guess uses three facts: the gradient mode, the mode of the modules, and the
order of fetches, forwards and backwards. "Without gradients" means under `no_grad`, or with every module in evaluation
mode.

| event | circumstances | result |
|---|---|---|
| forward without gradients | between a batch and its backward | candidate |
| | of a batch that was fetched without gradients | evaluation |
| | without a fetched batch | evaluation, until it is a habit |
| | the same, in each of eight steps in a row | part of every step, until a step has none |
| fetch without gradients | any | candidate |
| fetch under `no_grad` in training mode | after a fetch like it, from another loader | part of the same batch |
| | after a fetch like it, from the same loader | the first fetch was an evaluation's; candidate |
| candidate | training forward or backward follows | part of the step |
| | another batch or an evaluation follows | evaluation |
| evaluation | before the first backward of a step | the step begins at its last fetch or training forward |
| | between two micro-steps of a step | its time is cut out of the step (a hole) |
| | modules in evaluation mode, then gradients are reduced | training, not an evaluation |

Examples: A model that labels its own batch, or computes old probabilities, runs a forward between fetch and backward. A
policy that acts, or a metric after each step, is the habit. Semi-supervised training fetches from two loaders. A
validation of averaged weights, which run in no DDP module, fetches from one loader again and again.

After an evaluation the next step has no clean start for its own time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ddpobs.clocks import Stamp
from ddpobs.steps.raw_step import EVALUATION, Position, RawStep

_HABIT_STEPS = 8
"""Consecutive steps with a no-grad forward without a fetched batch (a policy that acts, for example), after which such
forwards count as part of the step."""


class Fetch(NamedTuple):
    """Circumstances of a fetch.

    Attributes:
        differentiated: Gradients are enabled.
        evaluating: Every module is in evaluation mode.
        loader: Any number that identifies the loader.
    """

    differentiated: bool
    evaluating: bool
    loader: int

    @property
    def trains(self) -> bool:
        """Whether the batch is fetched as training fetches it."""
        return self.differentiated and not self.evaluating

    @property
    def only_lacks_gradients(self) -> bool:
        """Whether the batch is fetched under `no_grad` with modules in training mode."""
        return not self.differentiated and not self.evaluating


@dataclass(slots=True)
class _Candidate:
    """A forward or fetch without gradients that may belong to an evaluation; decided at the next fetch or backward.

    Attributes:
        step: The open step: a candidate is dropped when its step ends.
        stamp: Its stamp.
        position: State of the step at that stamp.
        evaluating: Every module was in evaluation mode, or a batch was fetched.
        loaders: Loaders from which batches were fetched under `no_grad` in training mode; a step may fetch one of each.
    """

    step: RawStep
    stamp: Stamp
    position: Position
    evaluating: bool
    loaders: set[int]


class EvaluationGuess:
    """Find evaluations in the order of events, and remove their time from the open step.

    `StepTracker` passes the open step and the stamp of the event. Methods that return a bool report an evaluation
    unless they state otherwise.
    """

    def __init__(self) -> None:
        self._candidate: _Candidate | None = None
        self._awaits_backward = False
        """A batch was fetched for training, or a training forward ran, and no backward has followed."""
        self._fetched_to_evaluate = False
        """The last batch was fetched without gradients."""
        self._evaluated = False
        """An evaluation followed the last training forward."""
        self._stale = False
        """The open step may contain that evaluation."""
        self._hole: Position | None = None
        """State of the step at the start of an evaluation between two micro-steps."""
        self._has_unfetched = False
        """The step contains a forward without gradients and without a fetched batch."""
        self._steps_with_unfetched = 0
        self.began: Stamp | None = None
        """Start of the evaluation under way, or of its part that is not yet removed from the step."""

    # ------------------------------------------------------------------ training events

    def forward_began(self, differentiated: bool) -> None:
        """Accept the candidate at a training forward, if `differentiated`: backward may follow."""
        if differentiated:
            self._candidate, self._awaits_backward, self._fetched_to_evaluate = None, True, False
        elif self._candidate:
            self._candidate.loaders.clear()

    def clear_step(self, step: RawStep, stamp: Stamp) -> None:
        """Remove a preceding evaluation from the step of a training forward."""
        if self._stale:
            self._remove_evaluation(step, stamp)
        self._evaluated, self._hole, self.began = False, None, None

    @property
    def is_stale(self) -> bool:
        """Whether the open step may contain an evaluation that came before it."""
        return self._stale

    def begin_step(self, step: RawStep, position: Position) -> None:
        """Remove a preceding evaluation from a step that began at an earlier position."""
        if self._stale:
            began = step.switches[position.switches][1]
            step.drop_before(position)
            if self.began is not None:
                step.add_outside(EVALUATION, self.began, began)
        self._evaluated, self._stale, self._hole, self.began = False, False, None, None

    def accept(self) -> None:
        """Make the candidate part of the step: backward followed."""
        self._candidate, self._awaits_backward = None, False

    def revoke(self) -> None:
        """Discard an evaluation that was none: its gradients were reduced."""
        self._evaluated = self._stale = False
        self.began = None

    def step_closed(self) -> None:
        """Count the steps in a row that contain a forward without a fetched batch, and begin a new step."""
        self._steps_with_unfetched = self._steps_with_unfetched + 1 if self._has_unfetched else 0
        self._has_unfetched = False
        self.forget_positions()

    def step_abandoned(self) -> None:
        """Begin a new step; the old one counts for nothing."""
        self.accept()
        self._hole = self.began = None

    def forget_positions(self) -> None:
        """Drop every position in the open step, which no longer contains them."""
        self._hole = self._candidate = None

    # ------------------------------------------------------------------ events that may be an evaluation's

    def defers_forward(self, step: RawStep | None, stamp: Stamp, evaluating: bool) -> bool:
        """Return whether a forward without gradients stands before a backward; it is then a candidate."""
        if self._awaits_backward:
            self._propose(step, stamp, evaluating)
        return self._awaits_backward

    def judge_forward(self, step: RawStep | None, stamp: Stamp, evaluating: bool) -> bool:
        """Return whether a forward without gradients that was not deferred is an evaluation: False for a habit."""
        if not self._fetched_to_evaluate:
            self._has_unfetched = True
            if self._steps_with_unfetched >= _HABIT_STEPS:
                return False
        if evaluating:
            self._evaluated = self._stale = True
            self._begin(stamp)
            if step:
                self._open_hole(step, step.position, stamp)
        return True

    def extends_batch(self, fetch: Fetch) -> bool:
        """Return whether a fetch adds another loader's rows to the candidate's batch (this is no evaluation)."""
        if self._candidate is None or not fetch.only_lacks_gradients:
            return False
        return bool(self._candidate.loaders) and fetch.loader not in self._candidate.loaders

    def fetch_began(self, step: RawStep, stamp: Stamp, fetch: Fetch, *, begins_batch: bool) -> None:
        """Make a fetch without gradients a candidate.

        Args:
            step: The open step.
            stamp: Stamp of the fetch.
            fetch: Its circumstances.
            begins_batch: It is outside of other calls, and `extends_batch` was False.
        """
        self._awaits_backward, self._fetched_to_evaluate = fetch.trains, not fetch.trains
        if self._evaluated and begins_batch:
            self._remove_evaluation(step, stamp)
        if not fetch.trains:
            self._propose(step, stamp, evaluating=True)
        if fetch.only_lacks_gradients and self._candidate:
            self._candidate.loaders.add(fetch.loader)

    def reject(self) -> bool:
        """Make the candidate an evaluation: another batch or an evaluation followed. False without a candidate."""
        candidate, self._candidate = self._candidate, None
        if candidate is None:
            return False
        if candidate.evaluating:
            self._evaluated = True
            self._begin(candidate.stamp)
            self._open_hole(candidate.step, candidate.position, candidate.stamp)
        return True

    def _propose(self, step: RawStep | None, stamp: Stamp, evaluating: bool) -> None:
        if step and self._candidate is None:
            self._candidate = _Candidate(step, stamp, step.position, evaluating, set())

    def _open_hole(self, step: RawStep, position: Position, stamp: Stamp) -> None:
        if step.micro_steps and self._hole is None:
            self._hole = position
            step.open_hole(position, stamp)

    def _begin(self, stamp: Stamp) -> None:
        """Keep the start of an evaluation."""
        if self.began is None:
            self.began = stamp

    def _remove_evaluation(self, step: RawStep, stamp: Stamp) -> None:
        self._stale = False
        if self.began is not None:
            step.add_outside(EVALUATION, self.began, stamp)
            self.began = stamp
        if not step.micro_steps:
            step.restart(stamp)
        elif self._hole is not None:
            step.close_hole(self._hole, stamp)
