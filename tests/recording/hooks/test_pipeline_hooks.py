"""Hooks on a schedule's steps: they report steps that train, and leave nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddpobs.recording.hooks.pipeline_hooks import PipelineHooks
from ddpobs.torch_seam import pipelining


class Schedule:
    """A schedule that records its calls."""

    def __init__(self, micro_batches: int = 4, trains: bool = True) -> None:
        self.micro_batches, self._has_backward = micro_batches, trains
        self.calls = 0

    def step(self, *args: Any, fails: bool = False) -> str:
        self.calls += 1
        if fails:
            raise LookupError
        return "outputs"


class Calls:
    """Journal that records the calls of the hooks; also their events."""

    number = 7

    def __init__(self) -> None:
        self.names: list[Any] = []
        self.records = True

    def schedule_began(self) -> bool:
        self.names.append("began")
        return self.records

    def schedule_ended(self) -> None:
        self.names.append("ended")

    def event(self, kind: str, step: int, detail: dict[str, Any]) -> None:
        self.names.append((kind, step, detail["micro_batches"]))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(pipelining, "schedule_classes", lambda: [Schedule])

    def describe(schedule: Schedule) -> pipelining.Pipeline:
        return pipelining.Pipeline("Schedule", 2, [0], schedule.micro_batches, [0, 1])

    monkeypatch.setattr(pipelining, "describe", describe)
    return Calls()


@pytest.fixture
def hooks(calls: Calls) -> PipelineHooks:
    return PipelineHooks(calls, calls.event)  # type: ignore[arg-type]


def test_a_step_is_reported_and_a_schedule_once(calls: Calls, hooks: PipelineHooks) -> None:
    assert hooks.install()
    first, same, other = Schedule(), Schedule(), Schedule(8)
    assert [schedule.step() for schedule in (first, first, same, other)] == ["outputs"] * 4
    step, reported = ["began", "ended"], [("pipeline", 7, 4)]
    assert calls.names == [*step, *reported, *step, *step, *step, ("pipeline", 7, 8)]
    hooks.remove()


def test_an_error_in_a_step_is_raised_and_its_end_reported(calls: Calls, hooks: PipelineHooks) -> None:
    hooks.install()
    with pytest.raises(LookupError):
        Schedule().step(fails=True)
    assert calls.names[:2] == ["began", "ended"]
    hooks.remove()


def test_an_evaluation_is_not_a_step(calls: Calls, hooks: PipelineHooks) -> None:
    hooks.install()
    schedule = Schedule(trains=False)
    schedule.step()
    assert (schedule.calls, calls.names) == (1, [])
    hooks.remove()


def test_hooks_that_are_removed_report_nothing_even_inside_another_wrapper(calls: Calls, hooks: PipelineHooks) -> None:
    original = Schedule.step
    hooks.install()
    hooked = Schedule.step

    def wrapped(schedule: Schedule) -> str:
        return hooked(schedule)

    Schedule.step = wrapped  # type: ignore[method-assign, assignment]
    try:
        hooks.remove()
        assert Schedule().step() == "outputs"
        assert calls.names == []
    finally:
        Schedule.step = original  # type: ignore[method-assign]
    assert hooks.install()
    assert Schedule.step is original


def test_before_the_scripts_import_there_is_nothing_to_hook(
    calls: Calls, hooks: PipelineHooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelining, "schedule_classes", list)
    assert not hooks.install()
    monkeypatch.setattr(pipelining, "schedule_classes", lambda: [Schedule])
    assert hooks.install()
    Schedule().step()
    assert calls.names[0] == "began"
    hooks.remove()


def test_a_schedule_of_one_stage_and_of_several_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelining, "ranks_of", lambda group: group)
    stages = [SimpleNamespace(stage_index=index, num_stages=4, group=[1, 3]) for index in (1, 3)]
    several = SimpleNamespace(_stages=stages, _n_microbatches=8, _has_backward=True)
    single = SimpleNamespace(_stage=stages[0], _n_microbatches=8, _has_backward=False)
    assert pipelining.describe(several) == ("SimpleNamespace", 4, [1, 3], 8, [1, 3])
    assert pipelining.describe(single).held == [1]
    assert (pipelining.trains(several), pipelining.trains(single)) == (True, False)
