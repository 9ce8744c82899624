"""Batches survive encoding and decoding, and an invalid field is refused by name."""

from __future__ import annotations

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
from tests.support.wire_batches import GOLDEN, batch, spans

COLUMNS = len(wire.Steps.names)
INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(("encode", "content_type"), [(wire.encode, wire.MSGPACK), (wire.encode_json, wire.JSON)])
def test_a_batch_survives_both_encodings(encode: Any, content_type: str) -> None:
    decoded = wire.decode(encode(batch()), content_type)
    assert decoded.spans is not None
    for name in wire.Spans.names:
        np.testing.assert_array_equal(getattr(decoded.spans, name), getattr(spans(), name))
    assert (decoded.run, decoded.seq, decoded.anchor.wall_ns) == ("run-1", 0, 10**18)


def test_a_text_that_utf_8_cannot_encode_loses_no_batch() -> None:
    text = "caf\udce9.py"  # As Python reads a file name in Latin-1.
    hello = wire.Hello(host=text, pid=1, device="cpu", backend="gloo", versions={text: text}, settings={})
    pulse = wire.Pulse(at_ns=1, phase="data", step=2, place=text, stack=[text])
    sent = msgspec.structs.replace(batch(), hello=hello, pulse=pulse)
    decoded = wire.decode(wire.encode(sent))
    assert decoded.hello is not None
    assert decoded.pulse is not None
    assert decoded.spans is not None
    assert (decoded.hello.host, decoded.hello.versions) == ("caf?.py", {"caf?.py": "caf?.py"})
    assert (decoded.pulse.place, list(decoded.pulse.stack)) == ("caf?.py", ["caf?.py"])
    np.testing.assert_array_equal(decoded.spans.table, spans().table)


def _column(rows: int) -> st.SearchStrategy[list[int]]:
    """A column with any values, or with a few multiples of a thousand, like times of short steps."""
    few = st.sampled_from([-2000, -1000, 0, 1000])
    return st.lists(INT64, min_size=rows, max_size=rows) | st.lists(few, min_size=rows, max_size=rows)


COLUMN = st.lists(INT64, max_size=50) | st.lists(st.sampled_from([-2000, -1000, 0, 1000]), max_size=8)


@given(COLUMN)
def test_any_column_of_64_bit_integers_survives_both_encodings(values: list[int]) -> None:
    readiness = wire.Readiness(step=0, module=0, revision=0, ready_ns=np.array(values, np.int64))
    original = batch(readiness=[readiness])
    for body, content_type in ((wire.encode(original), wire.MSGPACK), (wire.encode_json(original), wire.JSON)):
        assert wire.decode(body, content_type).readiness[0].ready_ns.tolist() == values


@given(st.integers(0, 9).flatmap(lambda rows: st.lists(_column(rows), min_size=COLUMNS, max_size=COLUMNS)))
@example([[1000, 0]] * COLUMNS)
def test_columns_packed_together_survive(columns: list[list[int]]) -> None:
    steps = wire.Steps.from_table(np.array(columns, np.int64))
    assert (wire.unpack(wire.pack(steps), wire.Steps).table == steps.table).all()
    assert (np.array(list(packing.unpack(packing.pack(steps.by_name())).values())) == steps.table).all()


def test_regular_times_take_almost_no_space() -> None:
    rows = 5000
    assert len(wire.encode(batch(spans=spans(rows)))) < rows


@given(
    st.lists(
        st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(-1, 2**40), st.integers(0, 2**40)),
        max_size=20,
    ),
    st.sampled_from([1, 1000]),
)
def test_spans_survive_packing(rows: list[tuple[int, int, int, int]], repeats: int) -> None:
    times = np.tile(np.array(rows, np.int64).reshape(-1, 4), (repeats, 1))
    ready = times[:, 0]
    launched = ready + times[:, 1]
    done = launched + times[:, 3]
    started = np.where(times[:, 2] < 0, wire.UNKNOWN, np.minimum(times[:, 2], done))
    original = spans(len(ready), ready_ns=ready, launched_ns=launched, started_ns=started, done_ns=done)
    unpacked = wire.unpack_spans(wire.pack_spans(original))
    for name in wire.Spans.names:
        assert getattr(unpacked, name).tolist() == getattr(original, name).tolist()


@given(st.lists(st.lists(INT64, min_size=COLUMNS, max_size=COLUMNS), max_size=20))
def test_steps_survive_packing_even_if_predictions_are_wrong(rows: list[list[int]]) -> None:
    values = np.array(rows, np.int64).reshape(-1, COLUMNS).T
    ranks, columns = values[0], dict(zip(wire.Steps.names, values, strict=True))
    first_form = packing.pack({"rank": ranks, **columns})
    for packed in (wire.pack_steps(ranks, wire.Steps(**columns)), first_form):
        unpacked = wire.unpack_steps(packed)
        assert {name: column.tolist() for name, column in unpacked.items()} == {
            name: column.tolist() for name, column in {"rank": ranks, **columns}.items()
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
def test_invalid_packed_spans_are_refused_by_name(packed: bytes) -> None:
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


def test_packed_columns_beyond_the_size_limit_are_refused() -> None:
    packed = wire.pack_spans(spans(200_000))
    assert len(packed) < 20_000
    with pytest.raises(WireError, match="at most 1000000 bytes of columns, got 14400000"):
        wire.unpack_spans(packed, 1_000_000)


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("batch-*.zst")), ids=lambda path: path.stem)
def test_batches_of_older_clients_are_still_read(golden: Any) -> None:
    decoded = wire.decode(zstandard.decompress(golden.read_bytes()))
    assert decoded.version == int(golden.stem.removeprefix("batch-"))
    assert (decoded.run, decoded.seq, decoded.rank, decoded.layouts[0].name) == ("golden", 3, 1, "model")
    assert decoded.steps is not None
    assert decoded.steps.own_ns.tolist() == [95_000_000] * 4
    assert decoded.spans is not None
    assert (decoded.spans.done_ns - decoded.spans.launched_ns).tolist() == [10_000_000, 15_000_000] * 4
    assert [event.kind for event in decoded.events] == ["goodbye"]


def test_counters_are_unknown_in_a_batch_of_an_older_client() -> None:
    older = wire.decode(zstandard.decompress((GOLDEN / "batch-1.zst").read_bytes())).steps
    assert older is not None
    for name in ("running_ns", "run_delay_ns", "preemptions", "major_faults", "throttled_ns", "collections"):
        assert (getattr(older, name) == wire.UNKNOWN).all()
    for name in ("collecting_ns", "elements", "longest"):
        assert (getattr(older, name) == wire.UNKNOWN).all()


@pytest.mark.parametrize(("encode", "content_type"), [(wire.encode, wire.MSGPACK), (wire.encode_json, wire.JSON)])
def test_a_pulse_carries_the_state_of_its_machine(encode: Any, content_type: str) -> None:
    machine = wire.Machine(processors=4, load_milli=2500, device_slowdowns=["hw_thermal"])
    pulse = wire.Pulse(at_ns=0, phase="data", step=1, machine=machine)
    decoded = wire.decode(encode(batch(pulse=pulse)), content_type).pulse
    assert decoded is not None
    assert decoded.machine is not None
    assert msgspec.structs.asdict(decoded.machine) == msgspec.structs.asdict(machine)
    assert decoded.machine.quota_permille == wire.UNKNOWN


def test_every_version_has_its_golden_file() -> None:
    assert {path.stem for path in GOLDEN.glob("batch-*.zst")} == {f"batch-{n + 1}" for n in range(wire.VERSION)}


@pytest.mark.parametrize(
    ("changes", "field"),
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
def test_an_impossible_value_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError) as refused:
        wire.decode(wire.pack(batch(**changes)))
    assert refused.value.field == field


def test_phases_that_do_not_add_up_are_refused() -> None:
    single = np.array([1])
    columns = dict.fromkeys(wire.Steps.names, single) | {"start_ns": single * 0, "end_ns": single * 7}
    with pytest.raises(WireError, match="add up"):
        wire.decode(wire.encode(batch(steps=wire.Steps(**columns))))
    wire.decode(wire.encode(batch(steps=wire.Steps(**(columns | {"end_ns": single * 6})))))


@pytest.mark.parametrize(("step", "row"), [([0, 0, 1], 1), ([0, 2, 1], 2)])
def test_steps_out_of_order_are_refused_by_their_row(step: list[int], row: int) -> None:
    columns = dict.fromkeys(wire.Steps.names, np.zeros(3, np.int64))
    wire.decode(wire.encode(batch(steps=wire.Steps(**columns | {"step": np.arange(3)}))))
    with pytest.raises(WireError, match=rf"steps\.step: .* in row {row}$"):
        wire.decode(wire.encode(batch(steps=wire.Steps(**columns | {"step": np.array(step)}))))


def test_some_starts_may_be_unknown_but_none_after_the_end() -> None:
    ready = np.zeros(3, np.int64)
    times: dict[str, Any] = {"ready_ns": ready, "launched_ns": ready, "done_ns": ready + 5}
    wire.decode(wire.encode(batch(spans=spans(**times, started_ns=np.array([wire.UNKNOWN, 5, 0])))))
    with pytest.raises(WireError, match=r"spans\.started_ns: .* in row 1$"):
        wire.decode(wire.encode(batch(spans=spans(**times, started_ns=np.array([wire.UNKNOWN, 6, 0])))))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_a_wire_error(body: bytes) -> None:
    for content_type in (wire.MSGPACK, wire.JSON):
        with pytest.raises(WireError):
            wire.decode(body, content_type)


@pytest.mark.parametrize("column", [["<i1", 0, 7, b"12", 1], [1, 2], ["<i4", 0, 0, b"1234", 1000], None])
def test_columns_that_are_missing_or_have_another_length_are_refused(column: Any) -> None:
    plain = msgspec.msgpack.decode(wire.pack(batch()))
    if column is None:
        del plain["spans"]["done_ns"]
    else:
        plain["spans"]["done_ns"] = column
    with pytest.raises(WireError, match="done_ns") as refused:
        wire.decode(msgspec.msgpack.encode(plain))
    assert refused.value.field == ("spans" if column is None else "spans.done_ns")


def test_columns_may_be_lists_and_unknown_columns_are_skipped() -> None:
    plain = msgspec.msgpack.decode(wire.pack(batch()))
    whole = wire.decode(wire.pack(batch())).spans
    assert whole is not None
    plain["spans"] |= {"done_ns": whole.done_ns.tolist(), "invented_later": "x"}
    decoded = wire.decode(msgspec.msgpack.encode(plain)).spans
    assert decoded is not None
    assert (decoded.table == whole.table).all()


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="inhomogeneous"):
        spans(done_ns=np.array([1, 2]))
    with pytest.raises(TypeError, match="Spans lacks columns: bucket, done_ns, "):
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
def test_an_invalid_column_is_refused(column: Any) -> None:
    plain = msgspec.msgpack.decode(wire.pack(batch()))
    plain["spans"]["ready_ns"] = column
    with pytest.raises(WireError) as refused:
        wire.decode(msgspec.msgpack.encode(plain))
    assert refused.value.field == "spans.ready_ns"


def test_fields_of_a_newer_client_are_skipped() -> None:
    plain = msgspec.msgpack.decode(wire.encode(batch())) | {"invented_later": 1}
    assert wire.decode(msgspec.msgpack.encode(plain)).run == "run-1"
