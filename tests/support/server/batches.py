"""Small batches with times that can be added up by hand, and functions that send them as a client does."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import zstandard

from ddpobs import wire
from tests.support.columns import make_spans, make_steps

ATTEMPT = "aaaaaaaaaaaaaaaa"
MS = 1_000_000
STEP_MS = 100


def source_of(rank: int) -> str:
    return f"{rank:016x}"


def batch(run: str, seq: int = 0, rank: int = 0, **fields: Any) -> wire.Batch:
    defaults: dict[str, Any] = {
        "version": wire.VERSION,
        "run": run,
        "attempt": ATTEMPT,
        "source": source_of(rank),
        "seq": seq,
        "rank": rank,
        "world_size": 2,
        "emitted": 10,
        "dropped": 0,
        "anchor": wire.Anchor(wall_ns=10**18, monotonic_ns=0),
    }
    return wire.Batch(**defaults | fields)


def steps(first: int, count: int, **columns: Any) -> wire.Steps:
    """Steps of 100 ms: data 10, forward 20, backward 40, exposed 5, optimizer 20, other 5; own time 95."""
    number = np.arange(first, first + count)
    times = {"data": 10, "forward": 20, "backward": 40, "optimizer": 20, "other": 5}
    defaults: dict[str, Any] = {
        "step": number,
        "collective": number,
        "start_ns": number * STEP_MS * MS,
        "end_ns": (number + 1) * STEP_MS * MS,
        **{f"{phase}_ns": ms * MS for phase, ms in times.items()},
        **{f"own_{phase}_ns": ms * MS for phase, ms in times.items()},
        "exposed_comm_ns": 5 * MS,
        "own_ns": 95 * MS,
        "comm_ns": 30 * MS,
        "micro_steps": 1,
        "samples": 8,
        "flags": wire.SYNCHRONISED,
    }
    return make_steps(**defaults | columns)


def spans(first: int, count: int, **columns: Any) -> wire.Spans:
    """Two buckets per step: ready after 40 and 70 ms, reduced in 10 and 15 ms, the second fully exposed."""
    step = np.repeat(np.arange(first, first + count), 2)
    ready = step * STEP_MS * MS + np.tile([40 * MS, 70 * MS], count)
    defaults: dict[str, Any] = {
        "step": step,
        "bucket": np.tile([0, 1], count),
        "ready_ns": ready,
        "launched_ns": ready,
        "started_ns": wire.UNKNOWN,
        "done_ns": ready + np.tile([10 * MS, 15 * MS], count),
    }
    return make_spans(**defaults | columns)


def layout() -> wire.Layout:
    parameters = [[wire.Parameter(name="head.weight", size=250)], [wire.Parameter(name="stem.weight", size=500)]]
    buckets = [wire.Bucket(size_bytes=4 * names[0].size, dtype="float32", parameters=names) for names in parameters]
    return wire.Layout(module=0, name="model", revision=0, comm="allreduce", buckets=buckets)


def pulse(activity: str, idle_s: float = 0, **fields: Any) -> wire.Pulse:
    """A pulse of a rank with eight seconds of patience."""
    defaults: dict[str, Any] = {
        "at_ns": 0,
        "phase": "backward",
        "step": 7,
        "module": 0,
        "bucket": 0,
        "synchronised": 7,
        "idle_ns": int(idle_s * 1000 * MS),
        "patience_ns": 8000 * MS,
        "activity": activity,
    }
    return wire.Pulse(**defaults | fields)


def fingerprint(synchronised: int, **hashes: list[int]) -> wire.Fingerprint:
    """A sample of two parameters and a buffer."""
    columns = {"gradients": [1, 2], "parameters": [3, 4], "buffers": [5]} | hashes
    return wire.Fingerprint(
        module=0,
        synchronised=synchronised,
        names=["head.weight", "stem.weight"],
        buffer_names=["norm.mean"],
        **{name: np.array(values, np.int64) for name, values in columns.items()},
    )


def hello(host: str = "node") -> wire.Hello:
    return wire.Hello(host=host, pid=7, device="cpu", backend="gloo", versions={"torch": "2.13"})


def path(payload: wire.Batch) -> str:
    return f"/api/v1/runs/{payload.run}/sources/{payload.source}/batches/{payload.seq}"


def put(url: str, payload: wire.Batch, form: str = "zstd", **headers: str) -> httpx.Response:
    """Send a batch as `zstd` (the exporter's form), `msgpack`, `unpacked` (spans as columns) or `json`."""
    body = {"json": wire.encode_json, "unpacked": wire.pack}.get(form, wire.encode)(payload)
    content = {"Content-Type": wire.JSON if form == "json" else wire.MSGPACK}
    if form == "zstd":
        body, content["Content-Encoding"] = zstandard.compress(body), "zstd"
    return httpx.put(url + path(payload), content=body, headers=content | headers)


def get(url: str, route: str, **query: Any) -> Any:
    """The JSON of a route under /api/v1; the read must succeed."""
    answer = httpx.get(f"{url}/api/v1{route}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    return document


def stored_steps(url: str, run: str) -> list[int]:
    columns: dict[str, list[int]] = get(url, f"/runs/{run}/steps")["columns"]
    return columns["step"]
