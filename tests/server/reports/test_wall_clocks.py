"""If a wall clock is set back, the store does not keep a time in the future."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from ddpobs_server.analysis.steps.step_bins import NAMES, StepBins
from ddpobs_server.reports.read_bins import unix_times
from ddpobs_server.store import Arrival, Store

from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, steps

HOUR_NS = 3600 * 10**9


def arrive(store: Store, seq: int, at_ns: int, anchor: wire.Anchor) -> None:
    pulse = wire.Pulse(at_ns=anchor.monotonic_ns, phase="data", step=seq)
    body = wire.encode(batch("run", seq=seq, anchor=anchor, steps=steps(seq, 1), pulse=pulse))
    store.ingest([Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), at_ns)])


def test_after_the_collectors_clock_is_set_back_a_run_has_its_latest_arrival_time(store: Store) -> None:
    for seq, at_ns in enumerate((9 * HOUR_NS, HOUR_NS)):
        arrive(store, seq, at_ns, wire.Anchor(wall_ns=HOUR_NS, monotonic_ns=seq))
    run, (source,) = store.run("run"), store.sources("run", ATTEMPT)
    assert run is not None
    assert (run.last_seen_ns, run.last_step_seen_ns) == (HOUR_NS, HOUR_NS)
    assert (source.last_seen_ns, source.last_step_seen_ns) == (HOUR_NS, HOUR_NS)
    assert [row.run for row in store.aggregates(0, 2 * HOUR_NS).runs] == ["run"]
    assert store.aggregates(0, HOUR_NS - 1).runs == []


def test_a_ranks_clock_is_its_latest_anchor_although_older_ones_arrive_from_a_spool(store: Store) -> None:
    ahead, right, spooled = ((2 * HOUR_NS, 10), (HOUR_NS, 20), (3 * HOUR_NS, 5))
    for seq, (wall_ns, monotonic_ns) in enumerate((ahead, right, spooled)):
        arrive(store, seq, HOUR_NS, wire.Anchor(wall_ns=wall_ns, monotonic_ns=monotonic_ns))
    (source,) = store.sources("run", ATTEMPT)
    assert (source.anchor.wall_ns, source.anchor.monotonic_ns, source.last_step) == (HOUR_NS, 20, 2)
    assert source.pulse is not None
    assert (source.pulse.at_ns, source.pulse.step) == (20, 1)


def test_the_lowest_rank_is_sought_once_for_all_bins(store: Store) -> None:
    class Rank(int):
        comparisons = 0

        def __lt__(self, other: int) -> bool:
            Rank.comparisons += 1
            return int(self) < int(other)

    arrive(store, 0, HOUR_NS, wire.Anchor(wall_ns=HOUR_NS, monotonic_ns=0))
    (source,) = store.sources("run", ATTEMPT)
    table = np.zeros((len(NAMES), 100), np.int64)
    table[NAMES.index("rank")] = np.arange(100)
    bins = unix_times(StepBins(np.zeros(100, np.int64), table), [replace(source, rank=Rank(n)) for n in range(100)])
    assert set(bins.column("began_ns").tolist()) == {HOUR_NS}
    assert Rank.comparisons < 100
