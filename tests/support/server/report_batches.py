"""Batches of the run that reports are made of."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from ddpobs_server.store import Arrival, Store

from ddpobs import wire
from tests.support.analysis.scenario import MS, Slow, columns, own_times
from tests.support.columns import make_spans

RUN, ATTEMPT = "a-run", "0123456789abcdef"
RANKS = 3
HELLO = wire.Hello(host="node", pid=1, device="cpu", backend="gloo", versions={}, settings={})


def batch(rank: int, seq: int, **records: Any) -> wire.Batch:
    return wire.Batch(
        version=wire.VERSION,
        run=RUN,
        attempt=ATTEMPT,
        source=f"{rank:016x}",
        seq=seq,
        rank=rank,
        world_size=RANKS,
        emitted=100,
        dropped=0,
        anchor=wire.Anchor(wall_ns=0, monotonic_ns=0),
        **records,
    )


def ingest(store: Store, *batches: wire.Batch, received_ns: int = 1) -> None:
    arrivals = []
    for item in batches:
        body = wire.encode(item)
        arrivals.append(Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), received_ns))
    store.ingest(arrivals)


def select(rows: wire.Steps, keep: wire.Ints) -> wire.Steps:
    return wire.Steps(**{name: getattr(rows, name)[keep] for name in rows.names})


def spans_of(steps: wire.Steps) -> wire.Spans:
    """Two buckets a step: the first half-way through backward, the last ends with the step."""
    ready = np.stack([steps.end_ns - 30 * MS, steps.end_ns - 3 * MS], axis=1).reshape(-1)
    done = np.stack([steps.end_ns - 20 * MS, steps.end_ns], axis=1).reshape(-1)
    return make_spans(
        step=np.repeat(steps.step, 2),
        bucket=np.tile([0, 1], len(steps.step)),
        ready_ns=ready,
        launched_ns=ready,
        started_ns=wire.UNKNOWN,
        done_ns=done,
    )


def fill(store: Store, count: int, slow: tuple[Slow, ...] = ()) -> None:
    """Every rank sends its steps in two batches, the later ranks' first."""
    rank, steps = columns(own_times(count, RANKS, seed=1, slow=slow))
    for number in reversed(range(RANKS)):
        rows = np.flatnonzero(rank == number)
        first, second = (select(steps, part) for part in np.array_split(rows, 2))
        ingest(store, batch(number, 0, hello=HELLO, steps=first, spans=spans_of(first)))
        ingest(store, batch(number, 1, steps=second, spans=spans_of(second)))
