"""How long a collector takes to answer about large runs, over HTTP, beside the bounds it is held to.

    python -m benchmarks.reads [--times 30] [--postgres | --database-url URL] [--json FILE] [--smoke]

Two runs are written through the store as ranks send them, then a real collector is asked. *large* has ten million spans
(64 ranks, 40 buckets); *wide* has 1,024 ranks, in batches of two seconds as a live job's. One rank of each is slow in
backward, so that a diagnosis goes all its ways. `first` is an answer that nothing is kept of: a batch arrives before
each question. Beside it, asked in turn with the reads, stands how long SQLite takes to sum the length of all chunks.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import msgspec
import numpy as np
from ddpobs_server import bench
from ddpobs_server.store import Arrival, Store
from sqlalchemy import create_engine, text

from ddpobs import wire
from tests import databases

_GROUP = 64
_MS = 1_000_000
_SLOW_NS = 25 * _MS
_FIRST_LATE_BUCKET = 10


@dataclass(frozen=True)
class Shape:
    """A run: what its ranks send, and how many steps of a rank are in a batch."""

    name: str
    ranks: int
    steps: int
    buckets: int
    steps_a_batch: int

    @property
    def load(self) -> bench.Load:
        """As `ddpobs-server bench` would send it."""
        return bench.Load(self.ranks, self.steps // self.steps_a_batch, self.steps_a_batch, self.buckets, 0.0, 1)


LARGE = Shape("large", 64, 3_906, 40, 126)
WIDE = Shape("wide", 1_024, 2_000, 40, 4)
SMALL = {"large": Shape("large", 8, 160, 4, 40), "wide": Shape("wide", 16, 64, 4, 4)}


def batch(shape: Shape, rank: int, seq: int) -> wire.Batch:
    """What `ddpobs-server bench` sends, under this run's name; the last rank is late from one bucket on."""
    made = bench.batch(shape.load, rank, seq)
    first: dict[str, object] = {}
    if seq == 0:
        size = wire.Parameter(name="weight", size=250_000)
        buckets = [wire.Bucket(size_bytes=1_000_000, dtype="float32", parameters=[size])] * shape.buckets
        first["hello"] = wire.Hello(host=f"node{rank // 8}", pid=rank, device="cuda", backend="nccl", versions={})
        first["layouts"] = [wire.Layout(module=0, name="model", revision=0, comm="allreduce", buckets=buckets)]
    if rank == shape.ranks - 1 and made.steps is not None and made.spans is not None:
        late = np.where(made.spans.bucket >= min(_FIRST_LATE_BUCKET, shape.buckets - 1), _SLOW_NS, 0)
        times = {f"{name}_ns": getattr(made.spans, f"{name}_ns") + late for name in ("ready", "launched", "done")}
        names = ("backward_ns", "own_ns", "own_backward_ns", "end_ns")
        longer = {name: getattr(made.steps, name) + _SLOW_NS for name in names}
        first["spans"] = msgspec.structs.replace(made.spans, **times)
        first["steps"] = msgspec.structs.replace(made.steps, **longer)
    return msgspec.structs.replace(made, run=shape.name, **first)


def arrival(one: wire.Batch) -> Arrival:
    """The batch as ingest hands it on; its digest stands for the body's."""
    packed = one if one.spans is None else msgspec.structs.replace(one, packed_spans=wire.pack_spans(one.spans))
    digest = hashlib.sha256(f"{one.run} {one.source} {one.seq}".encode()).digest()
    return Arrival(packed, digest, len(packed.packed_spans or b""), time.time_ns())


def fill(store: Store, shape: Shape) -> int:
    """Write a run, all ranks going forward together; returns how many spans that were."""
    load = shape.load
    keys = ((rank, seq) for seq in range(load.batches) for rank in range(load.ranks))
    while group := list(itertools.islice(keys, _GROUP)):
        store.ingest([arrival(batch(shape, rank, seq)) for rank, seq in group])
    return load.spans
