"""Events of JSON files: of any size, in any order of fields, and of files that are none."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddpobs.errors import TraceFileError
from ddpobs.imports import trace_events
from ddpobs.imports.trace_events import TraceEvents

MIB = 2**20


class Named(msgspec.Struct):
    name: str = ""


NAMED = msgspec.json.Decoder(list[Named])


def event(number: int, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": f"op {number}", "ts": number, "dur": 1, "tid": 7, "args": {}} | fields


def names(path: Path) -> list[str]:
    return [one.name for piece in TraceEvents(path, NAMED).pieces() for one in piece]


def write(path: Path, document: Any, **style: Any) -> Path:
    path.write_text(json.dumps(document, **style))
    return path


@pytest.mark.parametrize("indent", [None, 2])
def test_events_come_in_the_order_of_the_file(tmp_path: Path, indent: int | None) -> None:
    events = [event(number, args={"text": "}, {", "list": [{"a": 1}, {"b": "]"}]}) for number in range(60_000)]
    path = write(tmp_path / "t.json", {"before": 1, "traceEvents": events, "after": [2]}, indent=indent)
    assert path.stat().st_size > 4 * MIB
    read = TraceEvents(path, NAMED)
    assert [one.name for piece in read.pieces() for one in piece] == [one["name"] for one in events]
    assert {name: json.loads(bytes(value)) for name, value in read.header.items()} == {"before": 1, "after": [2]}


def test_a_list_alone_and_a_packed_file_are_traces_too(tmp_path: Path) -> None:
    write(tmp_path / "list.json", [event(0), event(1)])
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": [event(0), event(1)]}).encode()))
    assert names(tmp_path / "list.json") == names(tmp_path / "packed.json.gz") == ["op 0", "op 1"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_packed_file_is_read_without_isal_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    monkeypatch.setattr(trace_events, "_GzipFile", gzip.GzipFile)
    monkeypatch.setattr(trace_events, "_DeflateError", zlib.error)
    content = gzip.compress(json.dumps([event(0), event(1)]).encode())
    (tmp_path / "packed").write_bytes(content if whole else content[:40] + b"\xff" * 20)
    with nullcontext() if whole else pytest.raises(TraceFileError, match="a whole gzip file"):
        assert names(tmp_path / "packed") == ["op 0", "op 1"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a list of events"),
        (b"\x80\x04 a pickle", "a list of events"),
        (b'{"traceEvents": [{"name": "a"}, {"na', "a whole list of events, got after 0 events none of its ends"),
        (b"{}", "an object with \"traceEvents\", got '{}'"),
        (b'{"traceEvents": [{"name": 3}]}', "after 0 events: Expected `str`, got `int`"),
        (b'{"x": {, "traceEvents": []}', "a JSON object"),
        (gzip.compress(b'{"traceEvents": [' + b'{"name": "a"},' * 9)[:-12], "a whole gzip file"),
        (b"[" * 200_000, "a whole list of events"),
        (b'[{"args": ' + b"[" * 200_000, "a whole list of events"),
    ],
    ids=[
        "empty",
        "not JSON",
        "cut off",
        "no events",
        "wrong type",
        "broken header",
        "broken gzip",
        "brackets",
        "nested arguments",
    ],
)
def test_what_is_no_trace_is_told(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=expected) as raised:
        names(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="No such file"):
        names(tmp_path / "none.json")


@pytest.mark.parametrize("piece", [b"[", b'{"a":', b'{"args":[{},{},'], ids=["lists", "objects", "one long event"])
def test_an_event_without_an_end_is_refused(tmp_path: Path, piece: bytes) -> None:
    path = tmp_path / "deep.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [')
        for _ in range(100):
            file.write(piece * (MIB // len(piece)))
    with pytest.raises(TraceFileError, match="at most 16 MiB"):
        peak_bytes(path)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    one = json.dumps(event(1)).encode() + b","
    peaks = []
    for mebibytes in (13, 39):
        path = tmp_path / f"{mebibytes}.json.gz"
        path.write_bytes(gzip.compress(b"[" + one * (mebibytes * MIB // len(one)) + one[:-1] + b"]", 1))
        peaks.append(peak_bytes(path))
    assert peaks[1] < 1.2 * peaks[0]


def peak_bytes(path: Path) -> int:
    """Read all events, and return the highest memory that this took."""
    tracemalloc.start()
    try:
        for _ in TraceEvents(path, NAMED).pieces():
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
