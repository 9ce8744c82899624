"""A large body arrives as its parts were, though it waits compressed."""

from __future__ import annotations

import os

import httpx
import pytest
from ddpobs_server.web.chunked_responses import CHUNK_BYTES
from ddpobs_server.web.packed_body import PackedBody

from benchmarks.rig.collector import Collector
from tests.support.server.batches import batch, put, spans, steps


@pytest.mark.parametrize("sizes", [[], [0], [1], [CHUNK_BYTES], [CHUNK_BYTES + 1], [3 * CHUNK_BYTES], [100_000] * 7])
def test_its_chunks_are_the_bytes_of_its_parts(sizes: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    body, whole = PackedBody(parts), b"".join(parts)
    assert len(body) == len(whole)
    read = [body[begin : begin + CHUNK_BYTES] for begin in range(0, len(body), CHUNK_BYTES)]
    assert b"".join(read) == whole


@pytest.mark.parametrize("part", [slice(1, CHUNK_BYTES), slice(0, 5)])
def test_another_part_is_refused(part: slice) -> None:
    with pytest.raises(ValueError, match=f"expected a part of {CHUNK_BYTES} bytes"):
        PackedBody([bytes(3 * CHUNK_BYTES)])[part]


def test_a_large_trace_arrives_whole(shared: Collector, run: str) -> None:
    for rank in range(2):
        assert put(shared.url, batch(run, rank=rank, steps=steps(0, 400), spans=spans(0, 400))).status_code == 201
    answer = httpx.get(f"{shared.url}/api/v1/runs/{run}/trace", params={"from": 0, "to": 399})
    assert int(answer.headers["content-length"]) == len(answer.content) > 2 * CHUNK_BYTES
    trace = answer.json()
    assert trace["displayTimeUnit"] == "ms"
    reductions = [event for event in trace["traceEvents"] if event["name"] in ("bucket 0", "bucket 1")]
    assert len(reductions) == 2 * 2 * 400
