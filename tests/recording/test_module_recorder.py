"""Phases add up, exposed communication is separate, and own time begins at the last synchronisation."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from ddpobs import wire
from ddpobs.recording.hooks.process_hooks import ProcessHooks
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.summary import Summariser
from tests.support.recorded_steps import Training, own, phases, plain_step, rows


@pytest.fixture
def training() -> Training:
    return Training()


def test_phases_add_up_to_the_wall_time(training: Training) -> None:
    for _ in range(3):
        plain_step(training, tail=2)
    training.fetch(10)
    for step in training.steps():
        assert phases(step) == {
            "data": 10,
            "forward": 20,
            "backward": 40,
            "exposed_comm": 30,
            "optimizer": 5,
            "other": 5,
        }
        assert sum(step.phases_ns) == step.end_ns - step.start_ns
    assert len(training.steps()) == 3


def test_steps_are_the_same_however_many_are_summarised_at_once(training: Training) -> None:
    for data in (10, 1000, 30):
        plain_step(training, data=data, tail=2)
        training.backward(40, 0, synchronised=False)
    together = training.steps()
    summariser = Summariser()
    summaries = [summariser.summarise(RawSteps.from_steps([raw], training.clock)) for raw in training.raw]
    assert [row for summary in summaries for row in rows(summary)] == together
    assert together[1].own_phases_ns is not None


def test_own_time_runs_from_the_last_synchronisation_to_the_last_readiness(training: Training) -> None:
    plain_step(training)
    plain_step(training, data=100)
    first, second = training.steps()
    assert first.own_phases_ns is None
    assert first.flags & wire.NO_ORIGIN
    assert own(second) == {"optimizer": 5, "other": 3, "data": 100, "forward": 20, "backward": 40}
    assert not second.flags & wire.NO_ORIGIN


def test_no_time_is_own_twice_if_the_reduction_waited_for_last_ends_first(training: Training) -> None:
    """As with two of Horovod's optimizers over the two halves of a model."""
    for _ in range(3):
        training.fetch(10)
        training.forward(20)
        training.journal.backward_began()
        later, earlier = training.recorder.backward(), training.recorder.backward()
        assert earlier is not None
        assert later is not None
        for record in (earlier, later):
            training.spend(20)
            record.ready_ns = record.launched_ns = [training.clock.now_ns] * 2
            record.done_ns = [training.clock.now_ns + 1] * 2
        training.journal.backward_ended()
        for record in (later, earlier):
            training.recorder.waiting_began()
            training.spend(1)
            training.recorder.finished(record)
            training.recorder.waiting_ended()
            training.optimizer(5)
    assert [own(step) for step in training.steps()[1:]] == [
        {"data": 10, "forward": 20, "backward": 40, "optimizer": 10}
    ] * 2


def test_the_optimizer_before_a_backward_belongs_to_the_previous_step_but_to_this_ones_own_time(
    training: Training,
) -> None:
    plain_step(training, optimizer=500)
    plain_step(training)
    first, second = training.steps()
    assert phases(first)["optimizer"] == 500
    assert phases(second)["optimizer"] == 5
    assert own(second)["optimizer"] == 500


def test_the_buffers_broadcast_is_communication_and_not_forward_and_not_own_time(training: Training) -> None:
    plain_step(training)
    training.fetch(10)
    training.forward(0)
    began = training.clock.now()
    training.spend(50)
    training.recorder.communicated("buffers", began, training.clock.now())
    training.spend(20)
    training.backward(40, 30)
    step = training.steps()[1]
    assert phases(step)["forward"] == 20
    assert phases(step)["exposed_comm"] == 80
    assert own(step)["forward"] == 20
    assert sum(own(step).values()) == 10 + 20 + 40 + 5 + 3
    assert step.comm_ns == 50 + 1 + 30


def test_micro_batches_belong_to_the_step_that_synchronises_them(training: Training) -> None:
    for _ in range(2):
        for synchronised in (False, False, True):
            training.fetch(10)
            training.forward(20)
            training.backward(40, 0, synchronised=synchronised)
        training.optimizer(5)
    steps = training.steps()
    assert [step.micro_steps for step in steps] == [3, 3]
    assert [step.samples for step in steps] == [12, 12]
    assert phases(steps[1])["backward"] == 120
    assert [step.collective for step in steps] == [0, 1]


def test_the_first_step_after_an_evaluation_has_no_clean_origin(training: Training) -> None:
    plain_step(training)
    training.fetch(7)
    training.forward(9, training=False)
    plain_step(training)
    plain_step(training)
    flags = [step.flags & wire.NO_ORIGIN for step in training.steps()]
    assert flags == [wire.NO_ORIGIN, wire.NO_ORIGIN, 0]


def test_a_checkpoint_leaves_the_next_step_without_clean_origin(training: Training, tmp_path: Any) -> None:
    hooks = ProcessHooks(training.journal, training.event)
    hooks.install()
    try:
        plain_step(training)
        plain_step(training)
        torch.save({}, tmp_path / "checkpoint")
        plain_step(training)
    finally:
        hooks.remove()
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, True]


def test_nothing_is_recorded_while_a_cuda_graph_is_captured(training: Training, monkeypatch: Any) -> None:
    captures: list[int] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda _: captures.append(training.clock.now_ns))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", lambda _: None)
    graph: Any = object()  # A real graph needs a GPU.
    hooks = ProcessHooks(training.journal, training.event)
    hooks.install()
    try:
        plain_step(training)
        plain_step(training)
        training.fetch(3)
        interrupted = training.recorder.backward()
        assert interrupted is not None
        torch.cuda.CUDAGraph.capture_begin(graph)
        training.fetch(7)
        training.forward(9)
        training.journal.backward_began()
        record = training.recorder.backward()
        training.recorder.finished(interrupted)  # The capture began during its backward.
        training.journal.backward_ended()
        torch.cuda.CUDAGraph.capture_end(graph)
        plain_step(training)
        plain_step(training)
    finally:
        hooks.remove()
    assert record is None
    assert captures
    assert training.clock.captures == [True, False]
    assert "cuda_graph_captured" in training.offered
    # Another rank, which captured nothing, counted that backward.
    assert [step.collective for step in training.steps()] == [0, 1, 3, 4]
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, True, False]


def test_a_skipped_optimizer_does_not_merge_two_steps(training: Training) -> None:
    for _ in range(3):
        training.fetch(1)
        training.forward(1)
        training.backward(10, 5)
    assert len(training.steps()) == 3


def test_a_closure_that_runs_backward_inside_the_optimizer_is_nested(training: Training) -> None:
    for _ in range(2):
        training.fetch(10)
        training.journal.optimizer_began()
        training.spend(2)
        training.forward(20)
        training.backward(40, 30)
        training.spend(3)
        training.journal.optimizer_ended()
    step = training.steps()[0]
    assert phases(step)["backward"] == 40
    assert phases(step)["exposed_comm"] == 30
    assert sum(step.phases_ns) == step.end_ns - step.start_ns == 105


def test_a_late_completion_is_cut_at_the_return_of_backward(training: Training) -> None:
    plain_step(training)
    raw = training.raw or (training.journal.finish(), training.raw)[1]
    raw[0].segments[0].records[0].done_ns = [0, training.clock.now_ns + 10**9]
    step = training.steps()[0]
    assert all(done_ns <= step.end_ns for done_ns in step.spans_done_ns)
    assert phases(step)["exposed_comm"] == 30


def test_readiness_of_parameters_is_sampled(training: Training) -> None:
    for _ in range(4):
        plain_step(training)
    assert [step.readiness for step in training.steps()] == [1, 0, 1, 0]


def test_unused_parameters_travel_only_when_the_set_changes(training: Training) -> None:
    for locally in ([], ["w"], ["w"], []):
        training.recorder.unused(locally, [])
    assert [record.locally for record in training.offered if isinstance(record, wire.Unused)] == [["w"], []]


def test_the_hooks_see_loader_backward_and_optimizer_and_leave_nothing_behind(training: Training) -> None:
    originals = (torch.autograd.backward, torch.save, torch.utils.data.DataLoader.__iter__)
    hooks = ProcessHooks(training.journal, training.event)
    hooks.install()
    try:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (batch,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2):
            training.recorder.forward_began((batch,))
            model(batch).sum().backward()
            optimizer.step()
    finally:
        hooks.remove()
    training.journal.entries.catch_up()
    raw = training.journal.entries._tracker.raw
    assert raw is not None
    recorded = {phase for phase, _ in raw.switches}
    assert {wire.PHASES[phase] for phase in recorded} >= {"data", "forward", "backward", "optimizer"}
    assert (torch.autograd.backward, torch.save, torch.utils.data.DataLoader.__iter__) == originals


@pytest.mark.parametrize("next_is", ["fetch", "forward", "optimizer"])
def test_a_failed_optimizer_takes_no_time_in_later_steps(training: Training, next_is: str) -> None:
    """A user may catch the error of a closure and continue; torch only reports that the step began."""

    def failing() -> float:
        training.journal.waiting_began()
        training.journal.waiting_ended()
        raise MemoryError

    hooks = ProcessHooks(training.journal, training.event)
    hooks.install()
    try:
        plain_step(training)
        training.forward(20)
        with pytest.raises(MemoryError):
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step(failing)
        if next_is == "optimizer":
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
        for _ in range(2):
            if next_is == "fetch":
                training.fetch(10)
            training.forward(20)
            training.backward(40, 30)
    finally:
        hooks.remove()
    assert wire.PHASES[training.journal.phase] == "other"
    assert [phases(step).get("optimizer", 0) for step in training.steps()] == [5, 0, 0]


def test_micro_batches_that_never_synchronise_are_no_step_and_take_bounded_memory(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpobs.steps.open_step.MAX_SWITCHES", 100)
    plain_step(training)
    for _ in range(1000):
        training.fetch(10)
        training.forward(20)
        training.backward(40, 0, synchronised=False)
        training.journal.waits.comm_ended(0, 0, training.clock.now_ns - 1, training.clock.now_ns)
    training.journal.entries.catch_up()
    step = training.journal.entries._tracker.raw
    assert step is not None
    assert len(step.switches) <= 100
    assert len(step.comms) <= 100
    plain_step(training)
    plain_step(training)
    _, interrupted, last = training.steps()
    assert sum(phases(interrupted).values()) == interrupted.end_ns - interrupted.start_ns
    assert [bool(step.flags & wire.NO_ORIGIN) for step in (interrupted, last)] == [True, False]


def test_endless_collectives_take_bounded_memory(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last step, for example. The next step has no clean start: the time they blocked was not recorded."""
    monkeypatch.setattr("ddpobs.steps.step_tracker.MAX_COMMS", 100)
    plain_step(training)
    plain_step(training)
    for _ in range(1000):
        training.spend(10)
        training.journal.waits.comm_ended(
            0, wire.COMM_KINDS.index("user"), training.clock.now_ns - 10, training.clock.now_ns
        )
    training.journal.entries.catch_up()
    step = training.journal.entries._tracker.raw
    assert step is not None
    assert len(step.comms) == 100
    plain_step(training)
    plain_step(training)
    training.journal.finish()
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, True, False]


def test_an_error_inside_telemetry_is_logged_once_and_never_raised(
    training: Training, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> int:
        raise OSError("clock is gone")

    monkeypatch.setattr(training.journal, "_now", broken)
    for _ in range(2):
        training.forward(1)
    assert caplog.text.count("training goes on") == 1


def test_a_look_at_the_mode_does_not_hold_the_ddp_module() -> None:
    """Otherwise the DDP module of a training that has ended would end later, on the telemetry thread."""
    looks, ends = threading.Event(), threading.Event()

    class Model(torch.nn.Linear):
        @property
        def training(self) -> bool:
            if threading.current_thread() is not threading.main_thread():
                looks.set()
                assert ends.wait(60)
            return True

        @training.setter
        def training(self, mode: bool) -> None:
            pass

    model = Model(2, 2)
    ddp = torch.nn.Module()
    ddp.module = model
    recorder = Training().add_recorder(1, ddp)
    thread = threading.Thread(target=lambda: recorder.training)
    thread.start()
    assert looks.wait(60)
    gone = weakref.ref(ddp)
    del ddp
    assert gone() is None
    ends.set()
    thread.join()
