"""Each limit has a setting and a response; a client that reaches it does not harm the other clients."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import pytest
import zstandard
from ddpobs_server.settings import Settings

from benchmarks.rig import patience
from benchmarks.rig.collector import Collector, collector
from benchmarks.soak_load import bombs
from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.export.http_sender import Outcome, Sender
from tests.support.server.batches import assert_problem, batch, get, hello, layout, path, put, source_of, spans, steps
from tests.support.server.serving import read_until_closed

LIMITS: dict[str, Any] = {
    "max_body_mb": 0.2,
    "max_batch_mb": 1,
    "max_under_way_mb": 0.05,
    "upload_timeout_s": 2,
    "max_records": 50,
    "max_names": 20,
    "max_name_length": 40,
    "max_layouts": 3,
    "max_buckets": 4,
    "max_ranks": 8,
    "max_sources": 3,
}
MONTHS = 2**53
"""A hundred days in ns."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with collector(tmp_path_factory.mktemp("small"), **LIMITS) as running:
        yield running
    assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """Limits as `small`, but with the usual time for an upload."""
    with collector(tmp_path_factory.mktemp("patient"), **LIMITS | {"upload_timeout_s": 60}) as running:
        yield running


def named(count: int = 1, length: int = 1) -> list[wire.Unused]:
    names = [str(index).ljust(length, "n") for index in range(count)]
    return [wire.Unused(step=0, module=0, locally=names, globally=[])]


def changed_layout(**changed: Any) -> wire.Layout:
    return msgspec.structs.replace(layout(), **changed)


def comms(module: int) -> wire.Comms:
    return wire.Comms(**{name: np.array([module if name == "module" else 0]) for name in wire.Comms.names})


def fingerprint(module: int) -> wire.Fingerprint:
    one = np.ones(1, np.int64)
    columns = {"gradients": one, "parameters": one, "buffers": one[:0]}
    return wire.Fingerprint(module=module, synchronised=0, names=["w"], buffer_names=[], **columns)


TOO_MUCH: dict[str, tuple[dict[str, Any], int]] = {
    # A module that only some of two ranks have is number 2 n or 2 n + 1.
    "MAX_RANKS": ({"world_size": 9}, 422),
    "MAX_RECORDS": ({"steps": steps(0, 51)}, 413),
    "MAX_RECORDS of spans": ({"spans": spans(0, 26)}, 413),
    "MAX_RECORDS of events": ({"events": [wire.Event(kind="e", at_ns=0)] * 51}, 413),
    "MAX_RECORDS of readiness": (
        {"readiness": [wire.Readiness(step=0, module=0, revision=0, ready_ns=np.arange(51))]},
        413,
    ),
    "MAX_NAMES": ({"unused": named(21)}, 413),
    "MAX_NAME_LENGTH": ({"unused": named(1, 41)}, 422),
    "MAX_NAME_LENGTH of details": ({"events": [wire.Event(kind="e", at_ns=0, detail={"a": "n" * 41})]}, 422),
    "MAX_LAYOUTS of a process": ({"layouts": [changed_layout(module=6)]}, 422),
    "MAX_LAYOUTS of a module": ({"layouts": [changed_layout(revision=3)]}, 422),
    "MAX_LAYOUTS of spans": ({"spans": spans(0, 1, module=np.array([0, 6]))}, 422),
    "MAX_LAYOUTS of revisions": ({"spans": spans(0, 1, revision=np.array([0, 3]))}, 422),
    "MAX_LAYOUTS of unused sets": ({"unused": [wire.Unused(step=0, module=6, locally=[], globally=[])]}, 422),
    "MAX_LAYOUTS of readiness": (
        {"readiness": [wire.Readiness(step=0, module=6, revision=0, ready_ns=np.arange(1))]},
        422,
    ),
    "MAX_LAYOUTS of comms": ({"comms": comms(module=6)}, 422),
    "MAX_BUCKETS of a layout": ({"layouts": [changed_layout(buckets=layout().buckets[:1] * 5)]}, 422),
    "MAX_BUCKETS of spans": ({"spans": spans(0, 1, bucket=np.array([0, 4]))}, 422),
}


@pytest.mark.parametrize("limit", TOO_MUCH)
def test_a_batch_beyond_a_limit_is_refused_and_the_setting_named(small: Collector, run: str, limit: str) -> None:
    fields, status = TOO_MUCH[limit]
    document = assert_problem(put(small.url, batch(run, **fields)), status)
    assert f"DDPOBS_SERVER_{limit.split(' ', maxsplit=1)[0]}" in document["detail"]


@pytest.mark.parametrize(("name", "status"), [("traceback", 201), ("output", 201), ("place", 422)])
def test_a_traceback_and_a_message_are_no_names(shared: Collector, run: str, name: str, status: int) -> None:
    event = wire.Event(kind="failed", at_ns=0, detail={name: "x" * 4000})
    assert put(shared.url, batch(run, events=[event])).status_code == status


@pytest.mark.parametrize("count", [100, 101])
def test_a_clients_own_facts_have_at_most_100_entries(small: Collector, run: str, count: int) -> None:
    facts: dict[str, wire.Scalar] = {str(number): number for number in range(count)}
    for fields in (
        {"hello": msgspec.structs.replace(hello(), settings=facts)},
        {"events": [wire.Event(kind="e", at_ns=0, detail=facts)]},
    ):
        answer = put(small.url, batch(run, **fields))
        if count == 100:
            assert "names" in assert_problem(answer, 413)["detail"], "the next limit"
        else:
            assert f"got {count}" in assert_problem(answer, 422)["detail"]


@pytest.mark.parametrize(("length", "status"), [(16_384, 201), (16_385, 422)])
def test_a_clients_own_facts_have_at_most_16384_characters(
    shared: Collector, run: str, length: int, status: int
) -> None:
    facts = {f"{number:02}": "x" * 1000 for number in range(16)} | {"rest": "x" * (length - 16 * 1002 - 4)}
    answer = put(shared.url, batch(run, hello=msgspec.structs.replace(hello(), settings=facts)))
    assert answer.status_code == status
    if status == 422:
        assert f"at most 16384 characters, got {length}" in assert_problem(answer, 422)["detail"]


def test_a_batch_at_its_limits_is_stored(small: Collector, run: str) -> None:
    full = batch(run, world_size=8, steps=steps(0, 49), unused=named(17, 40), layouts=[])
    assert put(small.url, full).status_code == 201
    assert put(small.url, batch(run, seq=1, layouts=[changed_layout(module=2, revision=2)])).status_code == 201


@pytest.mark.parametrize(("module", "status"), [(2 * 8 + 7, 201), (3 * 8, 422)])
def test_modules_of_some_ranks_are_limited_by_their_number_in_a_process(
    small: Collector, run: str, module: int, status: int
) -> None:
    fields: dict[str, Any] = {
        "layouts": [changed_layout(module=module)],
        "spans": spans(0, 1, module=np.array([0, module])),
    }
    assert put(small.url, batch(run, world_size=8, **fields)).status_code == status


@pytest.mark.parametrize(("module", "status"), [(2 * 8 + 7, 201), (3 * 8, 422)])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_fingerprints_are_limited_by_their_module(
    small: Collector, run: str, module: int, status: int, is_sharded: bool
) -> None:
    number = wire.replicas_module(module, 1, 8) if is_sharded else module
    assert put(small.url, batch(run, world_size=8, fingerprints=[fingerprint(number)])).status_code == status


def test_a_run_refuses_sources_beyond_its_limit_and_known_ones_may_send(small: Collector, run: str) -> None:
    answers = [put(small.url, batch(run, rank=rank, world_size=4)) for rank in range(4)]
    assert [answer.status_code for answer in answers] == [201, 201, 201, 429]
    assert "DDPOBS_SERVER_MAX_SOURCES" in assert_problem(answers[3], 429)["detail"]
    assert answers[3].headers["retry-after"] == "60"
    assert put(small.url, batch(run, seq=1, rank=2, world_size=4)).status_code == 201


def test_a_workspace_refuses_runs_beyond_its_limit_until_one_is_deleted(tmp_path: Path) -> None:
    with collector(tmp_path, max_runs=2) as running:
        assert [put(running.url, batch(name)).status_code for name in ("a", "b", "c")] == [201, 201, 429]
        assert put(running.url, batch("a", rank=1)).status_code == 201
        httpx.delete(f"{running.url}/api/v1/runs/a")
        assert put(running.url, batch("c")).status_code == 201


@contextmanager
def open_upload(url: str, size: int, target: str = path(batch("slow"))) -> Iterator[socket.socket]:
    """Open a PUT that announces a body of `size` bytes."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        head = f"PUT {target} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: {wire.JSON}\r\n"
        client.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
        yield client


def test_an_upload_that_does_not_end_gets_408(small: Collector) -> None:
    with open_upload(small.url, 1000) as client:
        client.sendall(b"{")
        answer = read_until_closed(client)
    assert answer.startswith("HTTP/1.1 408 ")
    assert "DDPOBS_SERVER_UPLOAD_TIMEOUT_S" in answer


def test_a_body_announced_as_too_large_is_refused_before_it_arrives(small: Collector) -> None:
    with open_upload(small.url, 10**12) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_length_with_thousands_of_leading_zeros_is_parsed(small: Collector, run: str) -> None:
    payload = batch(run)
    body = wire.encode_json(payload)
    address = urlsplit(small.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        head = f"PUT {path(payload)} HTTP/1.1\r\nHost: here\r\nContent-Type: {wire.JSON}\r\n"
        client.sendall(f"{head}Content-Length: {str(len(body)).zfill(5000)}\r\n\r\n".encode() + body)
        assert client.recv(65536).startswith(b"HTTP/1.1 201 ")


@pytest.mark.parametrize("announced", [True, False])
def test_the_sender_receives_the_refusal_of_a_too_large_body(small: Collector, announced: bool) -> None:
    body: Any = bytes(5_000_000) if announced else iter([bytes(50_000)] * 100)
    sender = Sender(TelemetryConfig(collector=small.url))
    answer = sender.send("large", source_of(0), 0, body)
    sender.close()
    assert (answer.outcome, "MAX_BODY_MB" in answer.detail) == (Outcome.REFUSED, True)


def test_each_kind_of_bomb_is_refused_with_little_memory(on_sqlite: Collector, run: str) -> None:
    good = batch(run)
    initial_kb = peak_kb(on_sqlite)
    for name, (body, headers) in bombs(good).items():
        answer = httpx.put(on_sqlite.url + path(good), content=body, headers=headers)
        assert answer.status_code in (413, 422), (name, answer.text)
        assert ("DDPOBS_SERVER_MAX_BATCH_MB" in answer.text) == name.startswith("a body"), (name, answer.text)
        assert "Key mismatch" not in answer.text
    assert peak_kb(on_sqlite) - initial_kb < 90_000
    assert put(on_sqlite.url, good).status_code == 201


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read memory from")
def test_many_bombs_at_once_use_little_memory(small: Collector, run: str) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    bomb = b"".join(compressor.compress(bytes(10**7)) for _ in range(50)) + compressor.flush()
    headers = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}
    initial_kb = peak_kb(small)
    with ThreadPoolExecutor(8) as pool:
        target = small.url + path(batch(run))
        answers = pool.map(lambda _: httpx.put(target, content=bomb, headers=headers), range(24))
        assert {answer.status_code for answer in answers} <= {413, 503}
    assert peak_kb(small) - initial_kb < 200_000


def peak_kb(running: Collector) -> int:
    """Peak memory of the collector's process."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{running.process.pid}/status").read_text())
    assert match is not None
    return int(match[1])


def test_bodies_beyond_the_memory_budget_get_503_with_retry_after(patient: Collector, run: str) -> None:
    payload = batch(run)
    body = wire.encode_json(payload) + b" " * 40_000
    other = batch(run, seq=1)
    with open_upload(patient.url, len(body), path(payload)) as client:
        client.sendall(body[:-1])
        patience.until(lambda: memory_in_use(patient.url) >= 40_000)
        busy = httpx.put(
            patient.url + path(other),
            content=wire.encode_json(other) + b" " * 20_000,
            headers={"Content-Type": wire.JSON},
        )
        client.sendall(body[-1:])
        assert client.recv(65536).startswith(b"HTTP/1.1 201 ")
    assert "DDPOBS_SERVER_MAX_UNDER_WAY_MB" in assert_problem(busy, 503)["detail"]
    assert busy.headers["retry-after"] == "1"
    assert memory_in_use(patient.url) == 0
    assert put(patient.url, other).status_code == 201


def test_a_client_that_disconnects_within_its_body_frees_its_memory(patient: Collector) -> None:
    with open_upload(patient.url, 1000) as client:
        client.sendall(b"{" * 900)
        patience.until(lambda: memory_in_use(patient.url) >= 900)
    patience.until(lambda: memory_in_use(patient.url) == 0)


def memory_in_use(url: str) -> float:
    metrics = httpx.get(f"{url}/metrics", params={"only": "collector"}).text
    match = re.search(r"^ddpobs_server_under_way_bytes (.+)$", metrics, re.MULTILINE)
    assert match is not None
    return float(match[1])


FAR: dict[str, dict[str, Any]] = {
    "anchor.wall_ns": {"anchor": wire.Anchor(wall_ns=-1, monotonic_ns=0)},
    "steps.start_ns": {"steps": steps(0, 2, start_ns=np.array([0, 1]) - MONTHS, end_ns=np.array([100, 101]) - MONTHS)},
    "steps.data_ns": {"steps": steps(0, 1, end_ns=np.array([MONTHS]), data_ns=np.array([MONTHS]))},
    "spans.ready_ns": {"spans": spans(0, 1, ready_ns=np.array([0, -MONTHS]))},
    "spans.started_ns": {"spans": spans(0, 1, started_ns=np.array([-1, -MONTHS]))},
    "spans.done_ns": {"spans": spans(0, 1, done_ns=np.array([MONTHS, MONTHS]))},
    "steps.samples": {"steps": steps(0, 1, samples=np.array([2**62]))},
    "steps.own_data_ns": {"steps": steps(0, 1, own_data_ns=np.array([-(2**62)]))},
    "spans.bucket": {"spans": spans(0, 1, bucket=np.array([0, 2**31]))},
}


@pytest.mark.parametrize("field", FAR)
def test_times_and_counts_that_no_training_has_are_refused(small: Collector, run: str, field: str) -> None:
    assert assert_problem(put(small.url, batch(run, **FAR[field]), "unpacked"), 422)["field"] == field


def test_a_wall_clock_that_is_ahead_becomes_a_finding(small: Collector, run: str) -> None:
    now = time.time_ns()
    put(small.url, batch(run, anchor=wire.Anchor(wall_ns=now, monotonic_ns=0), steps=steps(0, 1)))
    hour = wire.Anchor(wall_ns=now + 3600 * 10**9, monotonic_ns=0)
    put(small.url, batch(run, rank=1, anchor=hour, steps=steps(0, 1)))
    well, ahead = get(small.url, f"/runs/{run}/ranks")["ranks"]
    assert well["clock_ahead_ns"] < 60 * 10**9 < ahead["clock_ahead_ns"] <= 3600 * 10**9
    (finding,) = [f for f in get(small.url, f"/runs/{run}/diagnostics")["findings"] if f["code"] == "clock-skew"]
    assert finding["ranks"] == [1]


def test_every_limit_is_documented_with_its_default() -> None:
    text = (Path(__file__).parents[3] / "docs" / "operations" / "limits.md").read_text()
    documented = dict(re.findall(r"^\| `DDPOBS_SERVER_([A-Z_]+)` \| ([\d,]+)", text, re.MULTILINE))
    defaults = {name: Settings.model_fields[name].default for name in (*LIMITS, "max_runs", "queue_batches")}
    in_guide = {name.lower(): float(value.replace(",", "")) for name, value in documented.items()}
    assert {name: in_guide.get(name) for name in defaults} == defaults
