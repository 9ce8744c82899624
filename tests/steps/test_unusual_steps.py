"""Phases, own time and step numbers of unusual training loops."""

from __future__ import annotations

import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from ddpobs import wire
from ddpobs.recording.hooks.process_hooks import ProcessHooks
from tests.support.recorded_steps import Training, own, phases, plain_step


@pytest.fixture
def training() -> Training:
    return Training()


def test_closures_without_a_loader_are_a_step_each(training: Training) -> None:
    for _ in range(4):
        training.journal.optimizer_began()
        for _ in range(2):  # LBFGS calls its closure several times.
            training.forward(20)
            training.backward(40, 30)
        training.spend(5)
        training.journal.optimizer_ended()
        training.spend(1)
    training.journal.finish()
    steps = training.steps()
    assert [step.micro_steps for step in steps] == [2] * 4
    assert [phases(step)["backward"] for step in steps] == [80] * 4
    assert phases(steps[-1])["optimizer"] == 5


def test_a_backward_of_something_else_opens_no_step(training: Training) -> None:
    assert not training.journal.backward_began()
    training.journal.entries.catch_up()
    assert training.journal.entries._tracker.step is None


def test_an_unused_map_under_backward_is_not_exposed(training: Training) -> None:
    for _ in range(2):
        training.fetch(10)
        training.forward(20)
        launched = training.clock.now_ns
        training.backward(40, 30)
        training.journal.waits.comm_ended(0, wire.COMM_KINDS.index("unused_map"), launched, launched + 25)
    training.journal.finish()
    assert [phases(step)["backward"] for step in training.steps()] == [40, 40]
    assert [phases(step)["exposed_comm"] for step in training.steps()] == [30, 30]
    assert own(training.steps()[1])["backward"] == 40
    assert [step.comm_ns for step in training.steps()] == [25 + 30] * 2


def test_an_unused_bucket_has_no_span_and_hides_no_waiting(training: Training) -> None:
    for _ in range(2):
        training.fetch(10)
        training.forward(20)
        training.journal.backward_began()
        record = training.recorder.backward()
        assert record is not None
        training.spend(40)
        record.ready_ns[0] = record.launched_ns[0] = training.clock.now_ns
        training.spend(30)
        record.done_ns[0] = training.clock.now_ns
        training.recorder.finished(record)
        training.journal.backward_ended()
    training.journal.finish()
    assert [phases(step)["exposed_comm"] for step in training.steps()] == [30, 30]
    assert [len(step.spans_done_ns) for step in training.steps()] == [1, 1]


def test_a_collective_after_the_step_makes_no_communication_of_the_end_of_its_backward(training: Training) -> None:
    for _ in range(2):
        training.fetch(10)
        training.forward(20)
        training.backward(40, 3, tail=15)
        training.optimizer(5)
        began = training.clock.now()
        training.spend(2)
        training.recorder.communicated("user", began, training.clock.now())
    first, second = training.steps()
    assert phases(first) == {"data": 10, "forward": 20, "backward": 40, "exposed_comm": 5, "optimizer": 5, "other": 15}
    assert own(second) == {"data": 10, "forward": 20, "backward": 40, "optimizer": 5, "other": 15}


def test_a_graph_capture_drops_its_step_and_leaves_no_gap_in_the_numbers(training: Training) -> None:
    for _ in range(2):
        plain_step(training)
    training.fetch(10)
    training.journal.pause(True)
    assert training.journal.number == 2
    training.journal.fetch_ended()
    training.journal.pause(False)
    for _ in range(2):
        plain_step(training)
    training.journal.finish()
    assert [raw.number for raw in training.raw] == [0, 1, 2, 3]


def test_a_step_after_a_contribution_of_zeros_has_no_clean_start(training: Training) -> None:
    plain_step(training)
    plain_step(training)
    training.recorder.shadowed()
    plain_step(training)
    plain_step(training)
    training.journal.finish()
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, True, False]


def test_own_time_of_many_optimizers_is_whole_across_batches(training: Training) -> None:
    plain_step(training)
    for _ in range(399):
        training.optimizer(5)
    training.fetch(10)  # Closes the first step, which is summarised alone.
    assert phases(training.steps()[0])["optimizer"] == 400 * 5
    training.forward(20)
    training.backward(40, 30)
    training.journal.finish()
    assert own(training.steps()[1])["optimizer"] == 400 * 5


def test_pickled_tensors_are_no_checkpoint(training: Training) -> None:
    hooks = ProcessHooks(training.journal, training.event)
    hooks.install()
    try:
        plain_step(training)
        plain_step(training)
        pickle.dumps(torch.zeros(3))
        plain_step(training)
        torch.save({"weight": torch.zeros(3)}, io.BytesIO())
        plain_step(training)
    finally:
        hooks.remove()
    training.journal.finish()
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, False, True]


def test_another_threads_collective_during_a_backward_is_not_part_of_training(training: Training) -> None:
    training.fetch(10)
    training.forward(20)
    training.journal.backward_began()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(training.journal.waits.collective_wait_began).result() is None
        assert pool.submit(training.journal.waits.collective_wait_began, True).result() is not None


def test_an_optimizer_after_one_with_a_closure_belongs_to_its_step(training: Training) -> None:
    for _ in range(3):
        training.journal.optimizer_began()
        training.forward(20)
        training.backward(40, 30)
        training.journal.optimizer_ended()
        training.optimizer(7)
    training.journal.finish()
    assert [phases(step)["optimizer"] for step in training.steps()] == [7, 7, 7]
    assert [step.end_ns - step.start_ns for step in training.steps()] == [20 + 40 + 30 + 7] * 3


@pytest.mark.parametrize("frequency", ["after each entry", "by the training thread itself"])
def test_steps_are_the_same_however_late_the_journal_is_replayed(training: Training, frequency: str) -> None:
    def train(training: Training) -> list[Any]:
        for data in (10, 700, 30, 40):
            plain_step(training, data=data)
            training.journal.optimizer_began()
            training.forward(3)
            training.backward(40, 0, synchronised=False)
            training.journal.optimizer_ended()
            training.forward(800, training=False)
        return list(training.steps())

    late = train(training)
    assert len(late) == 4
    soon = Training()
    soon.journal.entries._full = 7 * 3
    if frequency == "after each entry":
        append = soon.journal.entries.append

        def append_and_replay(entry: Any) -> None:
            append(entry)
            soon.journal.entries.catch_up()

        soon.journal.entries.append = append_and_replay
    assert train(soon) == late
    soon.forward(20)
    assert len(soon.journal.entries._queue) <= 7 * 3


@pytest.mark.parametrize("fetched", [False, True])
def test_an_optimizer_that_failed_before_the_first_step_takes_no_time_later(training: Training, fetched: bool) -> None:
    training.journal.optimizer_began()
    training.journal.optimizer_is_running = lambda: False
    for _ in range(3):
        if fetched:
            training.fetch(10)
        training.forward(20)
        training.backward(40, 30)
        training.spend(5)
    steps = training.steps()
    assert len(steps) == 3
    assert [phases(step).get("optimizer", 0) for step in steps] == [0, 0, 0]


def test_a_forked_child_inherits_no_entries_and_no_held_lock(training: Training) -> None:
    plain_step(training)
    with training.journal.entries._replaying:
        child = os.fork()
        if not child:
            training.journal.finish()
            os._exit(len(training.raw) + 2 * len(training.journal.entries._queue))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(training.steps()) == 1


def test_a_replay_that_hangs_does_not_block_training(training: Training) -> None:
    plain_step(training)
    with training.journal.entries._replaying:
        training.journal.entries._full = 3 * 3
        for _ in range(10):
            plain_step(training)
        assert training.journal.number == 0
    assert len(training.steps()) == 11


def test_a_replay_that_hangs_forever_takes_bounded_memory(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.recording.entries._MAX_BACKLOG", 50)
    training.journal.entries._full = 3 * 3
    with training.journal.entries._replaying:
        for _ in range(100):
            plain_step(training)
            assert len(training.journal.entries._queue) <= 50 * 3
    for _ in range(2):
        plain_step(training)
    assert phases(training.steps()[-1])["backward"] == 40


def test_steps_are_recorded_after_training_moves_to_another_thread(training: Training) -> None:
    """A worker thread trains after the main thread fetched a batch to inspect it."""
    training.fetch(10)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(plain_step, training).result()
    training.journal.finish()
    steps = training.steps()
    assert [phases(step)["backward"] for step in steps] == [40] * 3
    assert [phases(step)["data"] for step in steps][1:] == [10] * 2


def test_training_that_moves_to_another_thread_after_some_steps_loses_no_forward(training: Training) -> None:
    for _ in range(2):
        plain_step(training)
    training.spend(700)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(plain_step, training).result()
    training.journal.finish()
    steps = training.steps()
    assert [phases(step)["forward"] for step in steps] == [20] * 4
    assert [step.samples for step in steps] == [4] * 4
    assert [bool(step.flags & wire.NO_ORIGIN) for step in steps] == [True, False, True, False]


def test_a_backward_without_torchs_function_ends_a_step_and_leaves_no_records(training: Training) -> None:
    for _ in range(3):
        training.fetch(10)
        training.forward(20)
        record = training.recorder.backward()
        assert record is not None
        training.spend(70)
        record.ready_ns[:] = record.launched_ns[:] = record.done_ns[:] = [training.clock.now_ns] * 2
        training.recorder.finished(record)
        training.optimizer(5)
    training.journal.finish()
    assert [phases(step) for step in training.steps()] == [{"data": 10, "forward": 90, "optimizer": 5}] * 3
    assert training.journal.entries._tracker.step is not None
    assert not training.journal.entries._tracker.step.records


def test_a_call_that_an_interrupt_cut_off_ends_with_the_next_forward(training: Training) -> None:
    for _ in range(2):
        plain_step(training)
    training.journal.fetch_began()
    for _ in range(3):
        plain_step(training)
    training.forward(20)
    training.journal.backward_began()
    training.forward(20)
    assert training.journal.backward_began()
    _, plain, *later_steps = map(phases, training.steps())
    assert later_steps[-2:] == [plain] * 2


def test_inputs_without_a_size_lose_only_their_sample_count(training: Training) -> None:
    class Sizeless(torch.Tensor):
        def size(self, *_: object) -> int:  # type: ignore[override]
            raise RuntimeError("no size")

    for inputs in (
        torch.zeros(4, 2).as_subclass(Sizeless),
        torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 2)]),
    ):
        training.recorder.forward_began((inputs,))
        training.backward(40, 30)
    training.journal.finish()
    assert [step.samples for step in training.steps()] == [0, 2]


def test_the_patched_save_function_can_be_pickled(training: Training) -> None:
    hooks = ProcessHooks(training.journal, training.event)
    original = torch.save
    hooks.install()
    try:
        assert pickle.loads(pickle.dumps(torch.save)) is torch.save
        assert torch.save is not original
    finally:
        hooks.remove()
    assert torch.save is torch.serialization.save is original


def test_time_after_the_last_step_is_no_part_of_it(training: Training) -> None:
    for _ in range(3):
        plain_step(training)
    training.spend(12_000)  # For example, an upload or the wait for the exit.
    training.journal.waits.comm_ended(
        0, wire.COMM_KINDS.index("user"), training.clock.now_ns, training.clock.now_ns + 500
    )
    training.spend(500)
    training.journal.finish()
    _, second, last = training.steps()
    assert (phases(second).pop("other"), phases(last)) == (3, {k: v for k, v in phases(second).items() if k != "other"})
    assert sum(last.phases_ns) == last.end_ns - last.start_ns
    assert (own(last), last.comm_ns) == (own(second), second.comm_ns)


def test_unused_sets_that_change_all_the_time_do_not_fill_a_batch(training: Training) -> None:
    """The collector limits the number of names in a batch."""
    names = [f"layer.{number}" for number in range(1500)]
    for step in range(20):
        training.recorder.unused(names[step:], [])
    sets = [record for record in training.offered if isinstance(record, wire.Unused)]
    assert [record.locally[0] for record in sets] == ["layer.0", "layer.1"]
    training.recorder.unused_names.batch_cut()
    training.recorder.unused_names.batch_cut()
    sets = [record for record in training.offered if isinstance(record, wire.Unused)]
    assert [record.locally[0] for record in sets][2:] == ["layer.19"]
    training.recorder.unused([], [])
    assert getattr(training.offered[-1], "locally", None) == []


def test_a_missing_stamp_is_replaced_by_the_one_before_it(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.forward(20)
    monkeypatch.setattr(training.journal, "_now", lambda: 0)
    training.backward(40, 30)
    monkeypatch.undo()
    plain_step(training)
    first, _ = training.steps()
    assert (first.start_ns, first.end_ns) == (1_000, 1_090)
    assert phases(first) == {"other": 90}  # The backward began with the forward, and took no time.


def test_a_save_by_safetensors_counts_as_a_checkpoint(training: Training, tmp_path: Path) -> None:
    """Scripts import its function by name."""
    hooks = ProcessHooks(training.journal, training.event)
    hooks.install()
    try:
        for saves in (False, False, True, False):
            plain_step(training)
            if saves:
                save_file({"w": torch.zeros(2)}, tmp_path / "w.safetensors")
    finally:
        hooks.remove()
    training.fetch(10)
    assert [bool(step.flags & wire.NO_ORIGIN) for step in training.steps()] == [True, False, False, True]
    assert not hasattr(vars(safetensors.torch)["serialize_file"], "__wrapped__")
