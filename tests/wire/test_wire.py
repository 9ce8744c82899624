"""What travels comes back the same, and what cannot be is refused by the name of its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from ddpobs import wire
from ddpobs.errors import WireError
from ddpobs.wire import packing
from tests.columns import make_spans

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
"""A batch as each version of the wire sent it."""
INT64 = st.integers(-(2**63), 2**63 - 1)


def spans(rows: int = 3, **changed: Any) -> wire.Spans:
    step = np.arange(rows)
    plain = {
        "step": step,
        "bucket": step % 2,
        "ready_ns": 10**15 + step * 1000,
        "launched_ns": 10**15 + step * 1000 + 5,
        "started_ns": wire.UNKNOWN,
        "done_ns": 10**15 + step * 1000 + 500,
    }
    return make_spans(**(plain | changed))


def batch(**changed: Any) -> wire.Batch:
    fields = {
        "version": 1,
        "run": "run-1",
        "attempt": "a" * 16,
        "source": "0123456789abcdef",
        "seq": 0,
        "rank": 0,
        "world_size": 2,
        "emitted": 3,
        "dropped": 0,
        "anchor": wire.Anchor(wall_ns=10**18, monotonic_ns=10**15),
        "spans": spans(),
    }
    return wire.Batch(**(fields | changed))


@pytest.mark.parametrize(("encode", "content_type"), [(wire.encode, wire.MSGPACK), (wire.encode_json, wire.JSON)])
def test_a_batch_comes_back_as_it_was_sent(encode: Any, content_type: str) -> None:
    back = wire.decode(encode(batch()), content_type)
    assert back.spans is not None
    for name in wire.Spans.names:
        np.testing.assert_array_equal(getattr(back.spans, name), getattr(spans(), name))
    assert (back.run, back.seq, back.anchor.wall_ns) == ("run-1", 0, 10**18)


def _of(rows: int) -> st.SearchStrategy[list[int]]:
    """A column of so many rows: anything, or a few multiples of a thousand, as times of short steps are."""
    few = st.sampled_from([-2000, -1000, 0, 1000])
    return st.lists(INT64, min_size=rows, max_size=rows) | st.lists(few, min_size=rows, max_size=rows)


COLUMN = st.lists(INT64, max_size=50) | st.lists(st.sampled_from([-2000, -1000, 0, 1000]), max_size=8)


@given(COLUMN)
def test_any_column_of_64_bit_integers_survives_both_encodings(values: list[int]) -> None:
    readiness = wire.Readiness(step=0, module=0, revision=0, ready_ns=np.array(values, np.int64))
    sent = batch(readiness=[readiness])
    for body, content_type in ((wire.encode(sent), wire.MSGPACK), (wire.encode_json(sent), wire.JSON)):
        assert wire.decode(body, content_type).readiness[0].ready_ns.tolist() == values


@given(st.integers(0, 9).flatmap(lambda rows: st.lists(_of(rows), min_size=20, max_size=20)))
@example([[1000, 0]] * 20)
def test_columns_that_travel_together_are_each_what_they_were(columns: list[list[int]]) -> None:
    sent = wire.Steps.from_table(np.array(columns, np.int64))
    assert (wire.unpack(wire.pack(sent), wire.Steps).table == sent.table).all()
    assert (np.array(list(packing.unpack(packing.pack(sent.by_name())).values())) == sent.table).all()


def test_regular_times_take_next_to_no_space() -> None:
    rows = 5000
    assert len(wire.encode(batch(spans=spans(rows)))) < rows


@given(
    st.lists(
        st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(-1, 2**40), st.integers(0, 2**40)),
        max_size=20,
    ),
    st.sampled_from([1, 1000]),
)
def test_packed_spans_are_the_spans(rows: list[tuple[int, int, int, int]], times_over: int) -> None:
    times = np.tile(np.array(rows, np.int64).reshape(-1, 4), (times_over, 1))
    ready = times[:, 0]
    launched = ready + times[:, 1]
    done = launched + times[:, 3]
    started = np.where(times[:, 2] < 0, wire.UNKNOWN, np.minimum(times[:, 2], done))
    sent = spans(len(ready), ready_ns=ready, launched_ns=launched, started_ns=started, done_ns=done)
    back = wire.unpack_spans(wire.pack_spans(sent))
    for name in wire.Spans.names:
        assert getattr(back, name).tolist() == getattr(sent, name).tolist()


@given(st.lists(st.lists(INT64, min_size=20, max_size=20), max_size=20))
def test_packed_steps_are_the_steps_whatever_others_foretell(rows: list[list[int]]) -> None:
    values = np.array(rows, np.int64).reshape(-1, 20).T
    ranks, sent = values[0], dict(zip(wire.Steps.names, values, strict=True))
    kept_before = packing.pack({"rank": ranks, **sent})
    for packed in (wire.pack_steps(ranks, wire.Steps(**sent)), kept_before):
        back = wire.unpack_steps(packed)
        assert {name: column.tolist() for name, column in back.items()} == {
            name: column.tolist() for name, column in {"rank": ranks, **sent}.items()
        }


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"rubbish",
        zstandard.compress(b"rubbish"),
        zstandard.compress(bytes(2_000_000)),
        wire.pack_spans(spans())[:-9],
    ],
)
def test_packed_spans_that_are_none_are_refused_by_name(packed: bytes) -> None:
    body = wire.pack(batch(spans=None, packed_spans=packed))
    with pytest.raises(WireError) as caught:
        wire.decode(body, limit_bytes=1_000_000)
    assert caught.value.field == "packed_spans"


def test_packed_columns_of_unequal_length_are_refused() -> None:
    rows, columns = msgspec.msgpack.decode(zstandard.decompress(wire.pack_spans(spans())))
    columns["done_ns"][4] = [b"\0\0"]
    packed = msgspec.msgpack.encode([rows, columns])
    with pytest.raises(WireError, match="packed_spans: expected 3 bytes, one a row, got 2"):
        wire.decode(wire.pack(batch(spans=None, packed_spans=packed)))


def test_packed_columns_that_would_take_too_much_are_refused() -> None:
    packed = wire.pack_spans(spans(200_000))
    assert len(packed) < 20_000
    with pytest.raises(WireError, match="at most 1000000 bytes of columns, got 12800000"):
        wire.unpack_spans(packed, 1_000_000)


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("batch-*.zst")), ids=lambda path: path.stem)
def test_what_older_clients_sent_is_still_read(golden: Any) -> None:
    read = wire.decode(zstandard.decompress(golden.read_bytes()))
    assert read.version == int(golden.stem.removeprefix("batch-"))
    assert (read.run, read.seq, read.rank, read.layouts[0].name) == ("golden", 3, 1, "model")
    assert read.steps is not None
    assert read.steps.own_ns.tolist() == [95_000_000] * 4
    assert read.spans is not None
    assert (read.spans.done_ns - read.spans.launched_ns).tolist() == [10_000_000, 15_000_000] * 4
    assert [event.kind for event in read.events] == ["goodbye"]


def test_every_version_has_its_golden_file() -> None:
    assert {path.stem for path in GOLDEN.glob("batch-*.zst")} == {f"batch-{n + 1}" for n in range(wire.VERSION)}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"spans": spans(done_ns=np.zeros(3, np.int64))}, "spans.done_ns"),
        ({"spans": spans(bucket=np.array([0, -1, 0]))}, "spans.bucket"),
        ({"rank": 2}, "rank"),
        ({"version": wire.VERSION + 1}, "version"),
        ({"run": "../etc"}, "run"),
        ({"source": "XYZ"}, "source"),
        ({"seq": -1}, "seq"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError) as refused:
        wire.decode(wire.pack(batch(**changed)))
    assert refused.value.field == field


def test_phases_that_do_not_add_up_are_refused() -> None:
    one = np.array([1])
    columns = dict.fromkeys(wire.Steps.names, one) | {"start_ns": one * 0, "end_ns": one * 7}
    with pytest.raises(WireError, match="add up"):
        wire.decode(wire.encode(batch(steps=wire.Steps(**columns))))
    wire.decode(wire.encode(batch(steps=wire.Steps(**(columns | {"end_ns": one * 6})))))


@given(st.binary(max_size=200))
def test_rubbish_is_refused_and_nothing_else_is_raised(body: bytes) -> None:
    for content_type in (wire.MSGPACK, wire.JSON):
        with pytest.raises(WireError):
            wire.decode(body, content_type)


@pytest.mark.parametrize("column", [["<i1", 0, 7, b"12", 1], [1, 2], ["<i4", 0, 0, b"1234", 1000], None])
def test_columns_that_are_missing_or_of_another_length_are_refused(column: Any) -> None:
    plain = msgspec.msgpack.decode(wire.pack(batch()))
    if column is None:
        del plain["spans"]["done_ns"]
    else:
        plain["spans"]["done_ns"] = column
    with pytest.raises(WireError, match="done_ns") as refused:
        wire.decode(msgspec.msgpack.encode(plain))
    assert refused.value.field == ("spans" if column is None else "spans.done_ns")


def test_columns_may_be_lists_and_new_ones_are_skipped() -> None:
    plain = msgspec.msgpack.decode(wire.pack(batch()))
    whole = wire.decode(wire.pack(batch())).spans
    assert whole is not None
    plain["spans"] |= {"done_ns": whole.done_ns.tolist(), "invented_later": "x"}
    back = wire.decode(msgspec.msgpack.encode(plain)).spans
    assert back is not None
    assert (back.table == whole.table).all()


def test_columns_of_unequal_length_make_no_record() -> None:
    with pytest.raises(ValueError, match="inhomogeneous"):
        spans(done_ns=np.array([1, 2]))
    with pytest.raises(TypeError, match="expected step, module"):
        wire.Spans(step=np.zeros(1, np.int64))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "column",
    [
        ["<i8", 0, 0, b"123"],
        ["<f8", 0, 0, b""],
        ["<i1", 2, 0, b""],
        ["<i1", 0, 0, b"123", 1, 1],
        ["<i1", 0, 2**63, b""],
        [2**63],
        [1.5],
        "x",
    ],
)
def test_a_column_that_is_none_is_refused(column: Any) -> None:
    plain = msgspec.msgpack.decode(wire.pack(batch()))
    plain["spans"]["ready_ns"] = column
    with pytest.raises(WireError) as refused:
        wire.decode(msgspec.msgpack.encode(plain))
    assert refused.value.field == "spans.ready_ns"


def test_fields_of_a_newer_client_are_skipped() -> None:
    plain = msgspec.msgpack.decode(wire.encode(batch())) | {"invented_later": 1}
    assert wire.decode(msgspec.msgpack.encode(plain)).run == "run-1"
