"""Gradient reduction inside a step of a pipeline's schedule.

A stage sends the gradients of its last micro-batch after its backward has returned. DDP's backward returns when its
all-reduces are done, so the earlier stages would wait for them. Inside a schedule's step our backward only launches the
last bucket. The step waits for the buckets at its end, when the rank has nothing else to do:

    stage 0    F0 F1 .. .. B0 .. B1 [wait]          ..  idle
    stage 1    .. F0 B0 F1 B1 ======[wait]          ==  all-reduce of the last stage, beside stage 0's last backward

The schedule scales the gradients by the number of micro-batches (`perform_reduce_grad`). That comes after the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ddpobs.errors import ReducerError
from ddpobs.torch_seam import pipelining
from ddpobs.torch_seam.patching import Patches

_patches = Patches()
_patched: list[type] = []


class StepReducer(Protocol):
    """A module's reducer, as a schedule's step uses it.

    Attributes:
        after_step: Called once, when the buckets have arrived.
    """

    after_step: Callable[[], object] | None

    def enter_step(self, launched: list[Any], /) -> None:
        """Begin a step: until `leave_step`, backward adds this reducer to the list and does not wait."""
        ...

    def leave_step(self) -> None:
        """End the step. If an error ended it, the buckets count as those of an interrupted backward."""
        ...

    @property
    def awaits_step_end(self) -> bool:
        """Whether all buckets of a backward were launched, and the step will wait for them at its end."""
        ...

    def finish_step(self) -> None:
        """Wait for the buckets, outside of backward, and call `after_step`."""
        ...


def install() -> None:
    """Wrap torch's schedules, once, if the script has imported them.

    Versions of torch without `perform_reduce_grad` scale gradients elsewhere: there backward waits as ever.
    """
    stage = pipelining.stage_class()
    if _patched or not hasattr(stage, "perform_reduce_grad"):
        return
    for schedule in pipelining.schedule_classes():
        _patched.append(schedule)
        _patches.put(schedule, "step", _waits_at_end)
    _patches.put(stage, "perform_reduce_grad", _scales_after_wait)


def _waits_at_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        stages = pipelining.stages_of(schedule)
        reducers = {stage.stage_index: found for stage in stages if (found := _reducer_of(stage)) is not None}
        if not (reducers and pipelining.trains(schedule)):
            return original(schedule, *args, **kwargs)
        launched: list[StepReducer] = []
        for reducer in reducers.values():
            reducer.enter_step(launched)
        try:
            result = original(schedule, *args, **kwargs)
            _check_all_reduced(schedule, [stage for stage in stages if reducers.get(stage.stage_index) not in launched])
            while launched:  # In the order of their backward passes, which is the same on every replica.
                launched[0].finish_step()
                del launched[0]
            return result
        finally:
            for reducer in reducers.values():
                reducer.leave_step()

    return step


def _check_all_reduced(schedule: Any, left_out: list[Any]) -> None:
    """Refuse a schedule that computes weights' gradients outside of backward, where torch's DDP is silent."""
    ours = [stage for stage in left_out if _reducer_of(stage) is not None]
    trained = [stage.stage_index for stage in ours if any(p.requires_grad for p in stage.submod.parameters())]
    if trained:
        raise ReducerError(
            f"{type(schedule).__name__} did not reduce the gradients of stage {', '.join(map(str, trained))}: it "
            "computes them with torch.autograd.grad, so that no hook of DistributedDataParallel runs. Use "
            "ScheduleGPipe, Schedule1F1B, ScheduleLoopedBFS or ScheduleInterleaved1F1B"
        )


def _scales_after_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def perform_reduce_grad(stage: Any, *args: Any, **kwargs: Any) -> Any:
        reducer = _reducer_of(stage)
        if reducer is None or not reducer.awaits_step_end:
            return original(stage, *args, **kwargs)
        reducer.after_step = partial(original, stage, *args, **kwargs)
        return None

    return perform_reduce_grad


def _reducer_of(stage: Any) -> StepReducer | None:
    """Return the reducer of a stage's module, if it is ours."""
    reducer = getattr(stage.submod, "reducer", None)
    return reducer if hasattr(reducer, "enter_step") else None
