"""Counts of torch's loaders, from real loaders in a training loop."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from ddpobs import wire
from ddpobs.steps.raw_step import InputSize
from tests.support.loops import DATA, Loop

START_S = 0.2


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    loop.loaders.install()
    train(loop, torch.ones(1))  # From here on this thread trains.
    yield loop
    loop.loaders.remove()


def train(loop: Loop, batch: torch.Tensor) -> None:
    loop.journal.forward_began(0, training=True, size=InputSize(len(batch)))
    loop.journal.backward_began()
    loop.journal.gradients_reduced(0, object())
    loop.journal.backward_ended()


def counts_of(loop: Loop) -> wire.Input:
    record = loop.loaders.counts.record()
    assert record is not None
    return record


def test_one_iterator_and_its_batches_are_counted(loop: Loop) -> None:
    loop.train(DataLoader(DATA, batch_size=2))
    record = counts_of(loop)
    assert (record.iterators, record.batches, record.workers) == (1, 4, 0)
    assert 0 < record.collating_ns <= record.fetching_ns


def test_new_iterators_are_counted_with_the_end_of_their_workers_which_is_data(loop: Loop) -> None:
    loader = DataLoader(DATA, batch_size=2, num_workers=1)
    for _ in range(3):
        (batch,) = next(iter(loader))
        train(loop, batch)
    record = counts_of(loop)
    assert (record.iterators, record.batches, record.workers, record.ahead) == (3, 3, 1, 2)
    assert record.creating_ns > 0
    assert record.closing_ns > 0


@pytest.mark.parametrize("persistent", [False, True])
def test_the_first_batch_of_each_epoch_has_a_time_of_its_own(loop: Loop, persistent: bool) -> None:
    loader = DataLoader(
        DATA, batch_size=2, num_workers=1, worker_init_fn=lambda _: time.sleep(START_S), persistent_workers=persistent
    )
    for _ in range(3):
        loop.train(loader)
    record = counts_of(loop)
    assert (record.iterators, record.batches, record.persistent) == (3, 12, persistent)
    assert START_S * 1e9 * (1 if persistent else 3) <= record.first_ns <= record.fetching_ns


def test_batches_of_an_evaluation_are_not_counted(loop: Loop) -> None:
    loop.train(DataLoader(DATA, batch_size=2))
    with torch.no_grad():
        list(DataLoader(DATA))
    assert counts_of(loop).batches == 4


def test_removed_hooks_count_nothing(loop: Loop) -> None:
    loop.loaders.remove()
    loop.train(DataLoader(DATA))
    assert loop.loaders.counts.record() is None
