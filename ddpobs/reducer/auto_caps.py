"""`bucket_cap_mb="auto"`: the predicted best buckets, kept only if they prove to be faster in this training.

A number of synchronised backward passes, which all ranks count alike, decides when something happens, so no rank
changes its buckets alone:

1. Sample: each rank stamps its gradients and transfers. Rank 0 fits `ddpobs.whatif`, and broadcasts its candidates.
2. Try: blocks of steps with the present buckets and with a candidate's, by turns. After each group rank 0 broadcasts
   whether to go on, keep the candidate, or undo it.
3. Look: from time to time rank 0 compares the step with that of the decision. If it has shifted, all begin anew.

All of it happens as a synchronised backward begins, before its first bucket: there every rank takes part in collectives
anyway. A forward is no such place, because one rank alone may run one. A rank that ends in between ends the others'
collective with an error, as in any backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic_ns

import torch

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import AllReduce, Pending
from ddpobs.reducer.caps_sample import CapsSample
from ddpobs.reducer.caps_trial import Decision, Trial, Verdict
from ddpobs.reducer.reducer import Reducer
from ddpobs.shared.paired_blocks import TimedStep
from ddpobs.torch_seam.collectives import broadcast_from_first, wait_for

WARM_UP, SAMPLED = 10, 24
"""Backward passes before the sample, and in it."""
LOOK_EVERY, _LOOKED = 512, 64
_SHIFT = 1.15
"""Factor between two step times from which the best buckets may be others."""
_MAX_ROUNDS = 4
"""Samples of one training: each change of the buckets is another layout for the collector to keep."""
Assignment = list[list[int]]


class AutoCaps:
    """Changes the buckets of one reducer.

    Args:
        core: The reducer; its buckets have been rebuilt in the order of the gradients.
    """

    def __init__(self, core: Reducer) -> None:
        self._core = core
        self._devices = {parameter.device for parameter in core.layout.parameters}
        self._is_cuda = core.layout.parameters[0].device.type == "cuda"
        self._backwards = self._rounds = self._forwards = 0
        self._marked: tuple[int, int] = (-1, 0)
        self._timed: deque[tuple[int, TimedStep]] = deque(maxlen=_LOOKED)
        """The latest steps, at least a trial's group, with the number of the backward that they begin with."""
        self._sample = CapsSample(core)
        self._candidates: list[Assignment] = []
        self._arms: list[Assignment] = []
        self._trial = Trial(seed=0)
        self._began = 0
        self._settled_ns = 0.0
        self._act_at = WARM_UP + SAMPLED
        """Number of backward passes at which `_act` is due; negative for never."""
        self._act: Callable[[], None] = self._plan

    @property
    def is_settled(self) -> bool:
        """Whether no sample and no trial is under way."""
        return self._act_at < 0 or self._act == self._look

    # ------------------------------------------------------------------ events of training

    def backward_began(self, forwards: int) -> None:
        """A synchronised backward begins, after so many forwards in all. The buckets may change. A collective call."""
        number, now_ns = self._backwards, monotonic_ns()
        (previous, began_ns), self._marked = self._marked, (number, now_ns)
        if previous == number - 1 and number:
            self._timed.append((previous, TimedStep(0, now_ns - began_ns, kind=forwards - self._forwards)))
        self._forwards = forwards
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            self.stop("a captured CUDA graph")
        self._do_what_is_due()
        if self._samples:
            self._sample.backward_began(number - self._first_sampled)

    def shadow_began(self) -> None:
        """This rank, out of data, takes part in a backward of the others. A collective call."""
        self._do_what_is_due()

    @property
    def _first_sampled(self) -> int:
        return self._act_at - SAMPLED

    @property
    def _samples(self) -> bool:
        """Whether the backward under way is in the sample."""
        return self._act == self._plan and self._first_sampled < self._backwards <= self._act_at

    @property
    def arrival_callbacks(self) -> list[Callable[[int], None]]:
        """What to call with the index of each parameter whose gradient arrives in this backward."""
        return [self._sample.arrived] if self._samples else []

    def bucket_launched(self, bucket: Bucket, pending: Pending) -> None:
        """A bucket was handed to its strategy."""
        if self._samples:
            self._sample.launched(bucket.index, pending)

    def stop(self, reason: str) -> None:
        """Keep the present buckets for the rest of the training."""
        if self._act_at >= 0:
            self._act_at = -1
            self._report("stopped", reason=reason)

    # ------------------------------------------------------------------ what is due

    def _do_what_is_due(self) -> None:
        """Count a backward that begins, and do what is due at its number."""
        if self._backwards == self._act_at:
            if type(self._core.comm) is not AllReduce or self._core.settings.static_graph:
                self.stop("another strategy or a static graph")
            elif len(self._devices) > 1:  # Another device's thread may be adding to a gradient that moves.
                self.stop("parameters on several devices")
            else:
                with torch.no_grad():
                    self._act()
        self._backwards += 1

    def _plan(self) -> None:
        self._rounds += 1
        took_ns = {number - self._first_sampled: step.took_ns for number, step in self._timed}
        self._candidates = self._sample.candidates([took_ns.get(step, 0) for step in range(SAMPLED - 1)])
        self._sample.clear()
        self._try_next()

    def _try_next(self) -> None:
        """Try the next candidate against the present buckets, or let the decision stand."""
        if not self._candidates:
            self._settle()
            return
        self._arms = [[list(bucket.members) for bucket in self._core.buckets], self._candidates.pop(0)]
        self._trial, self._began = Trial(seed=self._rounds), self._backwards
        self._act_at = self._began
        self._report("tried", buckets=len(self._arms[1]))
        self._act = self._turn
        self._turn()

    def _turn(self) -> None:
        """Begin a block, and at the end of a group decide."""
        step = self._act_at - self._began
        if step and step % self._trial.group_steps == 0 and self._decide(step - self._trial.group_steps):
            return
        if self._use(self._arms[self._trial.arm(step)]):
            self._act_at += self._trial.block_steps

    def _decide(self, first: int) -> bool:
        """Return whether the candidate's trial is over, as rank 0 judges it from the group that began at a step."""
        numbered = [(number - self._began, step) for number, step in self._timed]
        mine = self._trial.decide((number, step) for number, step in numbered if number >= first)
        decision = Decision(*self._broadcast(mine))
        if decision.verdict == Verdict.GO_ON:
            return False
        keeps = decision.verdict == Verdict.KEEP
        if self._use(self._arms[keeps]):
            self._report("kept" if keeps else "undone", buckets=len(self._core.buckets), **decision.figures)
            self._try_next()
        return True

    def _settle(self) -> None:
        """Wait until the step may have shifted."""
        self._act, self._act_at, self._settled_ns = self._look, self._backwards + LOOK_EVERY, 0.0

    def _look(self) -> None:
        latest_ns = median([step.took_ns for _, step in self._timed] or [0])
        settled_ns, self._settled_ns = self._settled_ns, self._settled_ns or latest_ns
        shifted = settled_ns > 0 and not 1 / _SHIFT < latest_ns / settled_ns < _SHIFT
        if self._rounds < _MAX_ROUNDS and self._broadcast([int(shifted)])[0]:
            self._report("shifted", before_ns=round(settled_ns), after_ns=round(latest_ns))
            self._act, self._act_at = self._plan, self._backwards + SAMPLED
        else:
            self._act_at += LOOK_EVERY

    # ------------------------------------------------------------------ means

    def _use(self, assignment: Assignment) -> bool:
        """Rebuild the buckets if they are others; False, and nothing happens any more, if they have to stay."""
        if assignment == [list(bucket.members) for bucket in self._core.buckets] or self._core.rebuild(assignment):
            return True
        self.stop("another tensor shares the memory of a gradient")
        return False

    def _broadcast(self, numbers: Sequence[float]) -> list[float]:
        """Return rank 0's numbers."""
        shared = torch.tensor(numbers, dtype=torch.float64, device=self._core.layout.parameters[0].device)
        wait_for(broadcast_from_first(self._core.group, [shared]))
        return [float(number) for number in shared.tolist()]

    def _report(self, outcome: str, **detail: str | int | float) -> None:
        if self._core.recorder is not None:
            self._core.recorder.event(f"bucket_caps_{outcome}", **detail)
