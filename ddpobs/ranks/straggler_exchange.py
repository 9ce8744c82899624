"""Straggler statistics, computed among the ranks through the process group's store, never through a collective.

Each rank's telemetry thread overwrites one key with its latest own times. The first rank's thread reads all keys and
computes. Ranks are compared that reduce gradients together: all ranks, or the replicas of a pipeline's stage.
A rank that is late, out of data or dead costs the other ranks nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.shared.delay import delays, excesses, is_late, moving

_ROWS, _MIN_ROWS = 8192, 32
"""Maximum number of rows of all ranks' tables together, and minimum number of rows of a rank's table."""
_BATCHES = 2
"""Latest batches that a rank's table covers.

Ranks cut their batches at different times. With two batches each, they share the steps of at least one.
"""
_FACTS = 3
COLUMNS = _FACTS + len(wire.OWN_PHASES)
"""Columns of a published row: collective, wall time of the step, exposed communication, own time by phase; times in
ns."""
_READ_TIMEOUT = timedelta(seconds=1)
_GOLDEN = 2_654_435_761
"""2^32 over the golden ratio (Knuth, The Art of Computer Programming 3, section 6.4)."""


class Exchange:
    """This rank's side of the exchange.

    Args:
        store: A `torch.distributed.Store` of its own (a clone), under a prefix that this attempt alone uses.
        rank: This process's rank.
        ranks: The ranks that publish and are compared, in rising order.
        every: Fewest new steps for an exchange, at most half of the table's rows.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], every: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._rows = np.empty((0, COLUMNS), np.int64)
        self._most = max(_MIN_ROWS, _ROWS // len(ranks))
        self._every = min(every, self._most // 2)
        self._added: deque[int] = deque(maxlen=_BATCHES)
        self._inverse_share = 1
        self._new_rows = 0
        self._last_compared = -1
        store.set_timeout(_READ_TIMEOUT)

    def add(self, steps: wire.Steps) -> None:
        """Add finished steps. A step without own time is left out, and therefore drops out of the join.

        If the table cannot hold all collectives, it holds a half, a quarter or an eighth of them: the same ones on all
        ranks.
        """
        rows = rows_of(steps)
        self._added.append(len(rows))
        self._inverse_share = 1 << max(0, math.ceil(math.log2(max(1, sum(self._added)) / self._most)))
        rows, older = self._sample(rows), self._sample(self._rows)
        size = min(self._most, max(_MIN_ROWS, 2 * self._every, sum(self._added)))
        self._rows = np.concatenate([older, rows])[-size:]
        self._new_rows += len(rows)

    def publish(self) -> None:
        """Overwrite this rank's key if enough rows are new."""
        if self._new_rows >= self._every:
            self._store.set(_key(self._rank), self._rows.astype("<i8").tobytes())
            self._new_rows = 0

    def gather(self) -> wire.Peers | None:
        """On the first rank, return statistics over the rows since the last call; None if these are too few."""
        keys = [_key(rank) for rank in self._ranks]
        if self._rank != self._ranks[0] or len(self._unseen(self._rows)) < self._every or not self._store.check(keys):
            return None
        blobs = self._store.multi_get(keys)
        tables = [self._unseen(np.frombuffer(blob, "<i8").reshape(-1, COLUMNS)) for blob in blobs]
        if min(map(len, tables)) < self._every:
            return None
        joined = join(tables)
        if len(joined) < self._every:
            return None
        self._last_compared = int(joined[-1, 0, 0])
        return statistics(joined, self._ranks)

    def _sample(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Select a share of the collectives by multiplicative hashing.

        The share is evenly spread even if the numbers rise by more than one at a time. A smaller share is a subset of a
        larger one.
        """
        return rows[rows[:, 0] * _GOLDEN % 2**32 * self._inverse_share < 2**32]

    def _unseen(self, table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Select the rows that no statistics cover yet."""
        return table[table[:, 0] > self._last_compared]


def rows_of(steps: wire.Steps) -> npt.NDArray[np.int64]:
    """Return a row for each step with own time, shape [rows, COLUMNS]."""
    own = [getattr(steps, f"own_{name}_ns") for name in wire.OWN_PHASES]
    facts = (steps.collective, steps.end_ns - steps.start_ns, steps.exposed_comm_ns)
    rows: npt.NDArray[np.int64] = np.stack([*facts, *own], axis=1)[steps.own_ns != wire.UNKNOWN]
    return rows


def join(tables: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Select the rows of the collectives that every rank has.

    Args:
        tables: One table per rank, shape [rows, COLUMNS], ascending in the collective.

    Returns:
        Shape [collectives, ranks, COLUMNS].
    """
    common = tables[0][:, 0]
    for table in tables[1:]:
        common = common[_are_in(common, table[:, 0])]
    return np.stack([table[_are_in(table[:, 0], common)] for table in tables], axis=1)


def _are_in(values: npt.NDArray[np.int64], ordered: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each value is in an ascending array. `np.isin` may import `numpy.ma`, amid training."""
    found: npt.NDArray[np.bool_] = np.searchsorted(ordered, values, "left") < np.searchsorted(ordered, values, "right")
    return found


def statistics(joined: npt.NDArray[np.int64], compared: Sequence[int] | None = None) -> wire.Peers:
    """Compute delay, waiting and straggler counts per rank.

    The phase of a step's delay is the phase in which its last rank exceeds the other ranks' median most.

    Args:
        joined: Shape [collectives, ranks, COLUMNS] with at least one collective and two ranks.
        compared: The ranks; None if they count from 0.
    """
    steps, ranks, _ = joined.shape
    phases = joined[:, :, _FACTS:].astype(np.float64)
    own = phases.sum(axis=2)
    last, delay = delays(own, excesses(own))
    straggles = is_late(delay, np.median(joined[:, :, 1], axis=1))
    phase = excesses(phases)[np.arange(steps), last].argmax(axis=1)

    def per_rank(weights: npt.NDArray[Any]) -> wire.Ints:
        return np.bincount(last, weights=weights, minlength=ranks).astype(np.int64)

    sums = joined.sum(axis=0)
    return wire.Peers(
        first_collective=int(joined[0, 0, 0]),
        last_collective=int(joined[-1, 0, 0]),
        steps=steps,
        rank=np.arange(ranks) if compared is None else np.array(compared),
        own_ns=sums[:, _FACTS:].sum(axis=1),
        **{f"own_{name}_ns": sums[:, _FACTS + index] for index, name in enumerate(wire.OWN_PHASES)},
        delay_ns=per_rank(delay),
        wait_ns=(own.max(axis=1, keepdims=True) - own).sum(axis=0).astype(np.int64),
        moving_ns=np.full(ranks, moving(joined[:, :, 2]).sum()),
        **{
            f"straggler_{name}": per_rank((straggles & (phase == index)).astype(np.float64))
            for index, name in enumerate(wire.OWN_PHASES)
        },
    )


def _key(rank: int) -> str:
    return f"own/{rank}"
