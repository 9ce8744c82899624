"""The application in this process, and a run of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from fastapi.testclient import TestClient

from ddpobs import wire
from tests.support.server.batches import MS, batch, hello, layout, path, spans, steps


@contextmanager
def client(database_url: str) -> Iterator[TestClient]:
    """The application in this process, which allows a test to count its statements."""
    with TestClient(create_app(Settings(database_url=database_url))) as http:
        yield http


def put(http: TestClient, sent_batch: wire.Batch) -> None:
    answer = http.put(path(sent_batch), content=wire.encode(sent_batch), headers={"Content-Type": wire.MSGPACK})
    assert answer.status_code == 201, answer.text


def fill(http: TestClient, run: str, ranks: int, count: int = 40) -> None:
    """Store all ranks' steps, in two batches each. The last rank has a slow backward and an unused parameter."""
    slow = 60 * MS
    for rank in range(ranks):
        for seq, (first, length) in enumerate(((0, count // 2), (count // 2, count - count // 2))):
            rank_steps = steps(first, length)
            if rank == ranks - 1:
                longer = {name: getattr(rank_steps, name) + slow for name in ("end_ns", "own_ns")}
                longer |= {name: getattr(rank_steps, name) + slow for name in ("backward_ns", "own_backward_ns")}
                rank_steps = steps(first, length, **longer)
            records = {"hello": hello(), "layouts": [layout()]} if seq == 0 else {}
            if rank == ranks - 1 and seq == 0:
                records["unused"] = [wire.Unused(step=0, module=0, locally=["stem.weight"], globally=[])]
            sent_batch = batch(
                run, seq, rank, world_size=ranks, steps=rank_steps, spans=spans(first, length), **records
            )
            put(http, sent_batch)
