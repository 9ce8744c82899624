"""Fingerprints in the store: samples kept, samples read, and the finding through HTTP."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from ddpobs_server.store import Arrival, Store, schema
from ddpobs_server.store.writing import fingerprints
from sqlalchemy import select

from benchmarks.rig.collector import Collector
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, assert_problem, batch, fingerprint, get, put


def arrive(store: Store, rank: int, *samples: wire.Fingerprint, seq: int = 0) -> None:
    store.ingest([Arrival(batch("run", seq, rank, fingerprints=list(samples)), bytes([rank, seq]), 1, 1)])


def kept(store: Store) -> list[int]:
    c = schema.fingerprints.c
    with store._engine.connect() as connection:
        return list(
            connection.execute(select(c.synchronised).where(c.run_id == "run").order_by(c.synchronised)).scalars()
        )


def differing(store: Store) -> list[tuple[int, int]]:
    """(rank, step) of the samples that a diagnosis reads."""
    return [(rank, sample.synchronised) for rank, sample in store.differing_fingerprints("run", ATTEMPT)]


def test_the_first_sample_and_the_latest_of_a_source_stay(store: Store) -> None:
    for seq in range(8):
        arrive(store, 0, *(fingerprint(1000 * (10 * seq + number)) for number in range(10)), seq=seq)
    latest = [1000 * number for number in range(80 - fingerprints.KEPT, 80)]
    assert kept(store) == [0, *latest]
    arrive(store, 1, fingerprint(3), seq=0)
    assert kept(store) == [0, 3, *latest]


def test_equal_replicas_are_not_read(store: Store) -> None:
    for rank in range(2):
        arrive(store, rank, *(fingerprint(step) for step in (0, 1000)))
    assert differing(store) == []


def test_the_first_sample_that_differs_is_read_with_the_one_before_it(store: Store) -> None:
    samples: dict[int, list[int]] = {0: [4, 4, 4, 4], 1: [4, 4, 9, 9]}
    for rank, hashes in samples.items():
        arrive(store, rank, *(fingerprint(1000 * i, parameters=[3, value]) for i, value in enumerate(hashes)))
    assert sorted(differing(store)) == [(0, 1000), (0, 2000), (1, 1000), (1, 2000)]
    read = dict(store.differing_fingerprints("run", ATTEMPT))
    assert read[1].parameters.tolist() == [3, 9]
    assert read[1].names == ["head.weight", "stem.weight"]


def test_a_sample_of_a_single_rank_is_not_compared(store: Store) -> None:
    arrive(store, 0, fingerprint(0), fingerprint(1000))
    arrive(store, 1, fingerprint(2000))
    assert differing(store) == []


def test_the_most_frequent_of_many_different_samples_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_MAX_BODIES", 2)
    for rank, value in enumerate((7, 4, 4, 4, 8)):
        arrive(store, rank, fingerprint(0, parameters=[3, value]))
    read = [rank for rank, _ in differing(store)]
    assert read[:4] in ([0, 1, 2, 3], [1, 2, 3, 4])
    assert len(read) == 4


def test_fingerprints_are_read_up_to_a_number_of_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(8):
        sample = fingerprint(0, parameters=[3, rank])
        samples = [msgspec.structs.replace(sample, module=module) for module in range(4)]
        arrive(store, rank, *samples)
    assert len(differing(store)) == 32
    monkeypatch.setattr(fingerprints, "_READ_BYTES", 1)
    assert len(differing(store)) == 2  # The sample that differs first, of two ranks: a finding needs no more.
    monkeypatch.setattr(fingerprints, "_READ_BYTES", 10**9)
    monkeypatch.setattr(fingerprints, "_MAX_MODULES", 3)
    assert len(differing(store)) == 24


def test_the_sample_that_differs_is_read_before_the_one_before_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "_READ_BYTES", 1)
    for rank in range(2):
        arrive(store, rank, fingerprint(0), fingerprint(1000, parameters=[3, rank]))
    assert {step for _, step in differing(store)} >= {1000}


def test_replicas_that_part_are_a_finding_with_parameter_rank_and_steps(shared: Collector, run: str) -> None:
    for rank in range(3):
        put(shared.url, batch(run, 0, rank, world_size=3, fingerprints=[fingerprint(0)]))
        part = {"parameters": [3, 9]} if rank == 1 else {}
        put(shared.url, batch(run, 1, rank, world_size=3, fingerprints=[fingerprint(1000, **part)]), form="json")
    (finding,) = (f for f in get(shared.url, f"/runs/{run}/diagnostics")["findings"] if f["code"] == "replicas-differ")
    assert (finding["ranks"], finding["parameters"], finding["steps"]) == ([1], ["stem.weight"], [0, 1000])
    assert finding["severity"] == "critical"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"gradients": [1]}, "fingerprints[0].gradients"),
        ({"parameters": [1, 2, 3]}, "fingerprints[0].parameters"),
        ({"buffers": []}, "fingerprints[0].buffers"),
    ],
)
def test_columns_that_do_not_fit_the_names_are_refused(
    on_sqlite: Collector, run: str, fields: dict[str, Any], field: str
) -> None:
    refused = put(on_sqlite.url, batch(run, fingerprints=[fingerprint(0, **fields)]))
    assert assert_problem(refused, 422)["field"] == field


@pytest.mark.parametrize("names", [["x"] * 20_001, ["x" * 1000] * 2001], ids=["names", "characters"])
def test_a_fingerprint_of_too_many_names_is_refused(on_sqlite: Collector, run: str, names: list[str]) -> None:
    zeros = [0] * len(names)
    sample = fingerprint(0, gradients=zeros, parameters=zeros)
    refused = put(on_sqlite.url, batch(run, fingerprints=[msgspec.structs.replace(sample, names=names)]))
    assert assert_problem(refused, 422)["field"] == "fingerprints[0].names"
