"""A batch costs in proportion to its size, whatever it is full of: in ingest, each read, and each background job.

Each shape fills batches of two sizes with what has made work grow faster than a batch: far steps, a layout for each
span, a kind for each event. The larger is four times as large. Its work may take little more than four times as long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from fastapi.testclient import TestClient

from benchmarks.rig import databases
from ddpobs import wire
from tests.support.server.batches import batch, fingerprint, layout, spans, steps
from tests.support.server.costs import costs
from tests.support.server.peers import peers

TIMES = 4
MAX_TIMES, LEAST_S = 9.0, 0.25
"""Most processor time of four times the batch, as a multiple, and the time that any work may take. Quadratic work takes
16 times as long."""
ATTEMPTS = 3
_BUSY: dict[str, wire.Scalar] = {"phase": "backward", "wall_ns": 1}


def _far_steps(count: int) -> wire.Batch:
    return batch("run", steps=steps(0, count, step=np.arange(count) * 2**20, collective=np.arange(count)))


def _steps(count: int) -> wire.Batch:
    return batch("run", steps=steps(0, count), spans=spans(0, count))


def _revisions(count: int) -> wire.Batch:
    """Spans with as many layouts as the limit allows, and buckets in no order."""
    number = np.arange(2 * count)
    columns = {"module": number * 7 % 900, "revision": number * 11 % 900, "bucket": number * 13 % 9000}
    return batch("run", spans=spans(0, count, **columns))


def _comms(count: int) -> wire.Batch:
    number, zeros = np.arange(count), np.zeros(count, np.int64)
    comms = wire.Comms(step=number * 1000, module=number % 900, kind=number % 5, launched_ns=zeros, done_ns=zeros)
    return batch("run", steps=steps(0, 40), comms=comms)


def _layouts(count: int) -> wire.Batch:
    layouts = [
        wire.Layout(module=number % 30, revision=number // 30, name=f"m{number}", comm="", buckets=layout().buckets)
        for number in range(count)
    ]
    return batch("run", steps=steps(0, 40), layouts=layouts)


def _unused(count: int) -> wire.Batch:
    names = [f"layer.{number}.weight" for number in range(20)]
    sets = [
        wire.Unused(step=number, module=number % 900, locally=names[number % 20 :], globally=[])
        for number in range(count)
    ]
    return batch("run", steps=steps(0, 40), layouts=[layout()], unused=sets)


def _events(count: int) -> wire.Batch:
    events = [wire.Event(kind=f"kind-{number}", at_ns=0, step=number, detail={"a": "b"}) for number in range(count)]
    died = [
        wire.Event(kind="died", at_ns=0, step=1, detail=_BUSY | {"rank": 0, "source": f"{number:016x}"})
        for number in range(count)
    ]
    return batch("run", steps=steps(0, 40), events=events + died)


def _samples(count: int) -> wire.Batch:
    readiness = [wire.Readiness(step=n, module=0, revision=0, ready_ns=np.arange(2)) for n in range(count)]
    return batch("run", steps=steps(0, 40), readiness=readiness, fingerprints=[fingerprint(n) for n in range(count)])


def _windows(count: int) -> wire.Batch:
    return batch("run", steps=steps(0, 40), peers=[peers(3 * number, 3 * number + 2) for number in range(count)])


SHAPES: dict[str, tuple[Callable[[int], wire.Batch], int]] = {
    "steps": (_steps, 5_000),
    "far steps": (_far_steps, 250),
    "a layout for each span": (_revisions, 500),
    "other communication": (_comms, 5_000),
    "layouts": (_layouts, 100),
    "unused sets": (_unused, 500),
    "events": (_events, 500),
    "samples": (_samples, 50),
    "windows of peers": (_windows, 500),
}
"""What makes a batch, and the number of it in the smaller batch."""


@contextmanager
def _collector(folder: Path) -> Iterator[tuple[TestClient, Settings]]:
    settings = Settings(
        database_url=databases.migrated_sqlite(folder), keep_spans_days=1, keep_share=1, max_records=200_000
    )
    with TestClient(create_app(settings)) as http:
        yield http, settings


@pytest.mark.wide
def test_four_times_the_batch_costs_little_more_than_four_times_the_work(tmp_path: Path) -> None:
    with _collector(tmp_path) as (http, settings):
        costs(http, settings, json.loads(wire.encode_json(_steps(10))), "warm")
        for name, (shape, count) in SHAPES.items():
            small, large = (json.loads(wire.encode_json(shape(size))) for size in (count, TIMES * count))
            before = costs(http, settings, small, f"{name}-small".replace(" ", "-"), statuses=(201,))
            too_long = set(before)
            for attempt in range(ATTEMPTS):  # A job of the collector's own may have run beside any of them.
                after = costs(http, settings, large, f"{name}-{attempt}".replace(" ", "-"), statuses=(201,))
                too_long = {
                    what
                    for what in too_long
                    if after[what].processor_s > max(MAX_TIMES * before[what].processor_s, LEAST_S)
                }
                if not too_long:
                    break
            assert not too_long, (name, {what: (before[what], after[what]) for what in too_long})
