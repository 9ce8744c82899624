"""Sampled readiness of parameters, read back from the store."""

from __future__ import annotations

import numpy as np
from ddpobs_server.store import Arrival, Store

from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, steps


def sample(step: int) -> wire.Readiness:
    return wire.Readiness(step=step, module=0, revision=0, ready_ns=np.array([step, step + 1]))


def store_samples(store: Store, rank: int, seq: int, *numbers: int) -> None:
    sent = batch(
        "run", seq, rank, world_size=3, steps=steps(min(numbers), 10), readiness=[sample(number) for number in numbers]
    )
    store.ingest([Arrival(wire.decode(wire.encode(sent)), bytes([rank, seq]) * 16, 100, 10**18)])


def test_samples_of_the_steps_and_ranks_are_returned_the_latest_first(store: Store) -> None:
    for rank in range(3):
        store_samples(store, rank, 0, 0, 4)
        store_samples(store, rank, 1, 10, 18)
    found = store.readiness("run", ATTEMPT, [0, 2], 4, 10)
    assert [item.step for _, item in found] == [10, 10, 4, 4]
    assert {rank for rank, _ in found} == {0, 2}
    assert found[0][1].ready_ns.tolist() == [10, 11]


def test_another_attempt_has_no_samples(store: Store) -> None:
    store_samples(store, 0, 0, 1)
    assert store.readiness("run", "b" * 16, [0], 0, 10) == []
