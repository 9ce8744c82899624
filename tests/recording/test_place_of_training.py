"""The place that the journal writes: phase, step and bucket after every event, in the training process alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from ddpobs import wire
from ddpobs.clocks import HostClock
from ddpobs.recording.journal import Journal
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.recording.place.last_place import LastPlace, step_of
from ddpobs.recording.place.place_file import Slot


class Training:
    """A journal with one module, which the test drives."""

    def __init__(self, folder: Path, modules: int = 1) -> None:
        self.place = LastPlace(folder / "places", f"{os.getpid():016x}")
        self.journal = Journal(HostClock(), lambda _: None, slots=self.place.slots)
        self.modules: list[torch.nn.Module] = []
        self.recorders = [self.recorder(index) for index in range(modules)]

    def recorder(self, index: int) -> ModuleRecorder:
        clock, module = HostClock(), torch.nn.Linear(2, 2)
        self.modules.append(module)
        recorder = ModuleRecorder(index, module, self.journal, clock=clock, offer=lambda _: None, readiness_every=2)
        recorder.layout([wire.Bucket(size_bytes=8, dtype="float32", parameters=[])] * 2, "all_reduce")
        return recorder

    def phase(self) -> str:
        return str(self.place.summary()["phase"])

    def backward(self, module: int = 0) -> None:
        self.journal.backward_began()
        record = self.recorders[module].backward()
        assert record is not None
        record.last_bucket[0] = 1
        self.recorders[module].finished(record)
        self.journal.backward_ended()

    def step(self) -> None:
        self.journal.fetch_began()
        self.journal.fetch_ended()
        self.recorders[0].forward_began((torch.zeros(4, 2),))
        self.backward()
        self.journal.optimizer_began()
        self.journal.optimizer_ended()


def test_every_event_changes_the_phase(tmp_path: Path) -> None:
    training = Training(tmp_path)
    journal, phases = training.journal, []
    events: tuple[Callable[..., object], ...] = (
        journal.fetch_began,
        journal.fetch_ended,
        lambda: training.recorders[0].forward_began((torch.zeros(4, 2),)),
        journal.backward_began,
        journal.backward_ended,
        journal.optimizer_began,
        journal.optimizer_ended,
        journal.waiting_began,
        journal.waiting_ended,
    )
    for event in events:
        before = training.place.slots[Slot.AT_NS]
        event()
        phases.append(training.phase())
        assert training.place.slots[Slot.AT_NS] > before
    assert phases[:4] == ["data", "other", "forward", "backward"]
    assert phases[4:] == ["other", "optimizer", "other", "exposed_comm", "other"]


def test_the_phase_of_an_error_stays(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    training.journal.fetch_began()
    training.journal.fetch_ended(raised=True)
    assert training.phase() == "data"
    training.journal.backward_began()
    training.journal.backward_ended(raised=True)
    assert training.phase() == "backward"


def test_the_step_is_that_of_the_tracker_between_and_after_replays(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for number in range(20):
        training.step()
        assert step_of(training.place.slots) == number
        assert training.place.slots[Slot.SYNCHRONISED] == number + 1
        if number % 3 == 0:
            assert training.journal.number == number
            assert step_of(training.place.slots) == number
    training.journal.fetch_began()
    assert step_of(training.place.slots) == 20 == training.journal.number


def test_two_modules_of_a_step_count_as_one_step(tmp_path: Path) -> None:
    training = Training(tmp_path, modules=2)
    for number in range(5):
        for module in (0, 1):
            training.recorders[module].forward_began((torch.zeros(4, 2),))
            training.backward(module)
        assert step_of(training.place.slots) == number
        training.journal.optimizer_began()
        training.journal.optimizer_ended()
    assert training.journal.number == 4
    assert training.place.slots[Slot.SYNCHRONISED] == 10


def test_the_bucket_is_reported_inside_of_backward_alone(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.recorders[0].forward_began((torch.zeros(4, 2),))
    training.journal.backward_began()
    record = training.recorders[0].backward()
    assert record is not None
    assert [training.place.summary()[name] for name in ("module", "bucket")] == [0, wire.UNKNOWN]
    record.last_bucket[0] = 1
    assert [training.place.summary()[name] for name in ("module", "bucket")] == [0, 1]
    training.journal.backward_ended()
    assert [training.place.summary()[name] for name in ("module", "bucket")] == [wire.UNKNOWN] * 2


def test_a_forked_child_writes_another_place_and_removes_none(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    before = bytes(training.place.slots)
    pid = os.fork()
    if pid == 0:
        training.step()
        training.place.close()
        os._exit(0 if training.journal.place.slots[Slot.SYNCHRONISED] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert bytes(training.place.slots) == before
    assert len(list((tmp_path / "places").iterdir())) == 1
    training.place.close()
    assert not list((tmp_path / "places").iterdir())
