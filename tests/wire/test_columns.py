"""Every column declares its range, and a column that was added later has a default for older records."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from ddpobs_server.store import chunks

from ddpobs import wire
from ddpobs.errors import WireError
from ddpobs.wire import packing
from ddpobs.wire.columns import Columns, added_later, ranges_of
from ddpobs.wire.fields import Counts, Durations, Ints, Times
from tests.support.wire_batches import batch, spans


class NewerSpans(wire.Spans):
    """Spans of a later version of the wire, with two more columns."""

    retries: Counts = added_later(0)
    queued_ns: Durations = added_later(7)


def is_extended(newer: Columns, older: Columns) -> bool:
    """Whether `newer` holds the columns of `older`, and each later column its default."""
    rows = len(older)
    expected = {**older.by_name(), "retries": np.zeros(rows), "queued_ns": np.full(rows, 7)}
    return {name: list(column) for name, column in newer.by_name().items()} == {
        name: list(column) for name, column in expected.items()
    }


def test_a_column_without_a_range_is_refused_when_its_class_is_created() -> None:
    with pytest.raises(
        TypeError, match=r"Forgetful\.extra has no range: annotate it with a kind of column from wire\.fields"
    ):

        class Forgetful(Columns):
            step: Counts
            extra: Ints


def test_a_column_without_a_range_is_refused_in_a_record_of_arrays_too() -> None:
    class Forgetful(msgspec.Struct):
        steps: int
        rank: Ints

    with pytest.raises(TypeError, match=r"Forgetful\.rank has no range"):
        ranges_of(Forgetful)


def test_a_column_declared_as_a_time_is_bounded_by_the_anchor() -> None:
    class Plain(Columns):
        step: Counts
        start_ns: Times

    assert [limits.is_time for limits in Plain.ranges.values()] == [False, True]
    far = np.full(3, 10**15 + 2 * wire.LONGEST_NS)
    late = spans(ready_ns=far, launched_ns=far, done_ns=far)
    with pytest.raises(WireError, match="within 30 days"):
        wire.decode(wire.encode(batch(spans=late)))


def test_a_record_has_the_ends_of_each_column() -> None:
    record = spans(started_ns=np.array([7, wire.UNKNOWN, 3]))
    assert record.ends("started_ns") == (wire.UNKNOWN, 7)
    assert record.select([0, 2]).ends("started_ns") == (3, 7)
    assert [record.ends(name) for name in record.names] == [(min(row), max(row)) for row in record.table.tolist()]


def test_an_older_record_becomes_a_newer_one_by_the_defaults_of_the_later_columns() -> None:
    assert is_extended(NewerSpans.of_older(spans().by_name()), spans())
    assert NewerSpans.of_older(spans().by_name() | {"retries": np.arange(3)}).retries.tolist() == [0, 1, 2]
    assert NewerSpans.required() == wire.Spans.required()


def test_a_record_is_not_built_without_a_later_column_so_that_a_rank_fills_each() -> None:
    columns = spans().by_name() | {"retries": np.arange(3)}
    with pytest.raises(TypeError, match="NewerSpans lacks columns: queued_ns; columns that it does not have: none"):
        NewerSpans(**columns)
    with pytest.raises(TypeError, match="Spans lacks columns: none; columns that it does not have: retries"):
        wire.Spans(**columns)


@pytest.mark.parametrize("rows", [0, 3, 5000])
def test_packed_columns_of_an_older_client_take_the_defaults(rows: int) -> None:
    older = spans(rows)
    assert is_extended(packing.unpack_as(NewerSpans, packing.pack(older.by_name())), older)
    assert is_extended(packing.unpack_columns(NewerSpans, msgspec.msgpack.decode(wire.pack(older))), older)


def test_plain_columns_of_an_older_client_take_the_defaults() -> None:
    plain = {name: column.tolist() for name, column in spans().by_name().items()}
    assert is_extended(packing.unpack_columns(NewerSpans, plain), spans())


def test_a_missing_column_without_a_default_is_still_refused() -> None:
    columns = spans().by_name()
    del columns["done_ns"]
    with pytest.raises(WireError, match="none of done_ns"):
        packing.unpack_as(NewerSpans, packing.pack(columns))
    with pytest.raises(ValueError, match="missing required field `done_ns`"):
        packing.unpack_columns(NewerSpans, {name: column.tolist() for name, column in columns.items()})


class NewerSteps(wire.Steps):
    """Steps of a later version of the wire, with one more column."""

    retries: Counts = added_later(3)


class NewerComms(wire.Comms):
    """Communication of a later version of the wire, with one more column."""

    retries: Counts = added_later(3)


@pytest.mark.parametrize(("kind", "newer"), [("steps", NewerSteps), ("comms", NewerComms), ("spans", NewerSpans)])
def test_a_chunk_of_an_older_collector_takes_the_defaults(
    kind: str, newer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    older: Any = {"steps": wire.Steps, "comms": wire.Comms, "spans": wire.Spans}[kind]
    record = older.from_table(np.arange(4 * len(older.names), dtype=np.int64).reshape(-1, 4))
    payload = chunks.pack(np.arange(4), record)
    monkeypatch.setattr(f"ddpobs.wire.tables.{kind.capitalize()}", newer, raising=False)
    monkeypatch.setattr(wire, kind.capitalize(), newer)
    columns = chunks.unpack(kind, 0, payload)
    assert set(columns) == {"rank", *newer.names}
    assert all(len(column) == 4 for column in columns.values())
    assert columns["retries"].tolist() == [newer.defaults["retries"]] * 4


@pytest.mark.parametrize("kind", ["steps", "spans"])
def test_a_chunk_of_the_first_schema_takes_the_defaults(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    older: Any = {"steps": wire.Steps, "spans": wire.Spans}[kind]
    newer: Any = {"steps": NewerSteps, "spans": NewerSpans}[kind]
    record = older.from_table(np.arange(4 * len(older.names), dtype=np.int64).reshape(-1, 4))
    monkeypatch.setitem(chunks.RECORDS, kind, newer)
    columns = chunks.unpack(f"{kind}-1", 0, zstandard.compress(wire.pack(record)))
    assert columns["retries"].tolist() == [newer.defaults["retries"]] * 4
