"""Reports of a repeated order, and loaders that count as the data phase."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from ddpobs.recording.hooks.loader_hooks import LoaderHooks
from ddpobs.recording.hooks.process_hooks import ProcessHooks
from ddpobs.recording.journal import Journal
from tests.support.loops import DATA, Loop
from tests.support.recorded_steps import FakeClock


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    hooks = ProcessHooks(loop.journal, lambda *_: None)
    hooks.install()
    loop.loaders.install()
    yield loop
    loop.loaders.remove()
    hooks.remove()


class Prefetching(DataLoader[Any]):
    """Fetches ahead on a separate thread."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        with ThreadPoolExecutor(1) as fetching:
            while (batch := fetching.submit(next, batches, None).result()) is not None:
                yield batch


class Endless:
    """A custom iterator, which can be copied."""

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> int:
        return 1


class WithCustomIterator(DataLoader[Any]):
    def __iter__(self) -> Any:
        return Endless()


class WithTorchIterator(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def sampler(shuffle: bool = True) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=shuffle)


@pytest.mark.parametrize("epochs", [2, 3])
@pytest.mark.parametrize("reporting", [False, True])
@pytest.mark.parametrize("peeks", [False, True])
@pytest.mark.parametrize(("inside", "workers"), [(False, 0), (True, 0), (False, 1)])
def test_a_second_epoch_in_the_order_of_the_first_is_reported_once(
    loop: Loop, *, inside: bool, workers: int, peeks: bool, reporting: bool, epochs: int
) -> None:
    """Whether or not the telemetry thread checked during an epoch, and whether or not the script peeks at a batch."""
    loop.reporting = reporting
    shuffled = sampler()
    arguments: dict[str, Any] = {"batch_sampler": BatchSampler(shuffled, 2, False)} if inside else {"sampler": shuffled}
    loader = DataLoader(DATA, num_workers=workers, **arguments)
    for _ in range(epochs):
        if peeks:
            next(iter(loader))
        loop.train(loader)
    first = 2 if inside else 4
    loop.loaders.report_repeated_order()
    detail = {"sampler": "DistributedSampler", "dataset": "TensorDataset", "epoch": 0}
    assert loop.events == [("sampler_without_set_epoch", first, detail)]


def set_epoch_in_every_epoch(loop: Loop) -> None:
    shuffled = sampler()
    for epoch in range(3):
        shuffled.set_epoch(epoch)
        loop.train(DataLoader(DATA, sampler=shuffled))


def a_sampler_without_shuffling(loop: Loop) -> None:
    loader = DataLoader(DATA, sampler=sampler(shuffle=False))
    for _ in range(3):
        loop.train(loader)


def a_peek_at_a_batch_before_each_epoch(loop: Loop) -> None:
    shuffled = sampler()
    loader = DataLoader(DATA, sampler=shuffled)
    for epoch in range(3):
        next(iter(loader))
        shuffled.set_epoch(epoch)
        next(iter(loader))
        loop.train(loader)


def an_evaluation_on_the_training_data(loop: Loop) -> None:
    shuffled = sampler()
    loader = DataLoader(DATA, sampler=shuffled)
    for epoch in range(3):
        shuffled.set_epoch(epoch)
        loop.train(loader)
        loop.journal.evaluation.covers_all = lambda: True
        list(loader)
        loop.journal.evaluation.covers_all = lambda: False


def a_random_sampler(loop: Loop) -> None:
    loader = DataLoader(DATA, sampler=RandomSampler(DATA))
    for _ in range(3):
        loop.train(loader)


def accelerates_own_sampler(loop: Loop) -> None:
    from accelerate.data_loader import prepare_data_loader

    loader = prepare_data_loader(
        DataLoader(DATA, shuffle=True), num_processes=2, process_index=0, use_seedable_sampler=True
    )
    for _ in range(3):
        loop.train(loader)


def a_distributed_sampler_that_accelerate_sets(loop: Loop) -> None:
    loader = DataLoaderShard(DATA, batch_sampler=BatchSampler(sampler(), 2, False))
    for _ in range(3):
        loop.train(loader)


@pytest.mark.parametrize(
    "training",
    [
        set_epoch_in_every_epoch,
        a_sampler_without_shuffling,
        a_peek_at_a_batch_before_each_epoch,
        an_evaluation_on_the_training_data,
        a_random_sampler,
        accelerates_own_sampler,
        a_distributed_sampler_that_accelerate_sets,
    ],
)
def test_no_event_is_reported_if_no_order_repeats(loop: Loop, training: Callable[[Loop], None]) -> None:
    training(loop)
    assert loop.journal.number >= 5
    assert loop.events == []


def test_the_work_of_accelerates_loader_on_a_batch_is_the_data_phase(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
        loop.clock.now_ns += 70
        return batch

    monkeypatch.setattr(sys.modules["accelerate.data_loader"], "send_to_device", send_to_device)
    loop.train(DataLoaderShard(DATA, device=torch.device("cpu"), batch_size=2))
    assert loop.phase_ns() == {"data": 4 * 70}


def test_the_wait_for_a_loader_that_fetches_ahead_on_a_separate_thread_is_the_data_phase(loop: Loop) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            loop.clock.now_ns += 70
            return super().__getitem__(index)  # type: ignore[no-untyped-call]

    loader = Prefetching(Slow(torch.arange(8.0).unsqueeze(1)), batch_size=2)
    loop.train(loader)
    assert loop.phase_ns() == {"data": 8 * 70}
    assert iter(loader).gi_yieldfrom is None, "other attributes of the iterator stay available"


def test_a_loader_subclass_with_torchs_iterator_keeps_it(loop: Loop) -> None:
    assert isinstance(iter(WithTorchIterator(DATA)), _BaseDataLoaderIter)


def test_a_custom_iterator_is_true_and_can_be_copied_as_without_telemetry(loop: Loop) -> None:
    """Scripts write `if not batches: batches = iter(loader)`; a generator has no length."""
    assert iter(Prefetching(DATA, batch_size=2))
    assert next(copy(iter(WithCustomIterator(DATA)))) == 1


def test_the_hooks_leave_nothing_behind() -> None:
    def current() -> list[Any]:
        return [owner.__iter__ for owner in (DistributedSampler, DataLoaderShard, DataLoaderDispatcher)]

    originals = current()
    hooks = LoaderHooks(Journal(FakeClock(), print), print)
    hooks.install()
    assert all(now is not then for now, then in zip(current(), originals, strict=True))
    hooks.remove()
    assert current() == originals
