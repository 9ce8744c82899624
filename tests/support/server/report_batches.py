"""Batches of the run that reports are made of."""

from __future__ import annotations

import hashlib

from ddpobs_server.store import Arrival, Store

from ddpobs import wire

RUN, ATTEMPT = "a-run", "0123456789abcdef"
RANKS = 3


def batch(rank: int, seq: int, **records: object) -> wire.Batch:
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
        **records,  # type: ignore[arg-type]
    )


def ingest(store: Store, *batches: wire.Batch, received_ns: int = 1) -> None:
    arrivals = []
    for item in batches:
        body = wire.encode(item)
        arrivals.append(Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), received_ns))
    store.ingest(arrivals)
