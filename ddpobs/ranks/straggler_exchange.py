"""Who was last, made among the ranks themselves: through the process group's store, never through a collective.

Each rank's telemetry thread overwrites one key with its latest own times; rank 0's thread reads them all and
computes. A rank that is late, out of data or dead costs the others nothing.
"""

from __future__ import annotations

import math
from collections import deque
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs import wire

_ROWS, _FEWEST = 8192, 32
"""Of all ranks, and of one."""
_BATCHES = 2
"""A rank's table reaches back over so many of its batches: ranks cut theirs at different times, and share one's."""
COLUMNS = 2 + len(wire.OWN_PHASES)
"""Of a published row: collective, the step's wall time, own time by phase; all in ns but the first."""
ALARM_SHARE = 0.1
"""A rank straggles in a step when its delay is above this share of the step."""
_READ_TIMEOUT = timedelta(seconds=1)
_GOLDEN = 2_654_435_761
"""2^32 over the golden ratio (Knuth, The Art of Computer Programming 3, section 6.4)."""


class Exchange:
    """This rank's end of the exchange.

    Args:
        store: A `torch.distributed.Store` of its own (a clone), under a prefix that this attempt alone uses.
        rank: This process's rank.
        world_size: How many ranks publish.
        every: Fewest new steps worth an exchange; where the table holds less than twice as many, half of these.
    """

    def __init__(self, store: Any, rank: int, world_size: int, every: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._rows = np.empty((0, COLUMNS), np.int64)
        self._most = max(_FEWEST, _ROWS // world_size)
        self._every = min(every, self._most // 2)
        self._added: deque[int] = deque(maxlen=_BATCHES)
        self._apart = 1
        self._fresh = 0
        self._seen = -1
        store.set_timeout(_READ_TIMEOUT)

    def add(self, steps: wire.Steps) -> None:
        """Take in finished steps; one without own time is left out, and so drops out of the join.

        Where the table does not hold all, it holds a half, a quarter or an eighth of the collectives, on all ranks the
        same ones.
        """
        own = [getattr(steps, f"own_{name}_ns") for name in wire.OWN_PHASES]
        rows = np.stack([steps.collective, steps.end_ns - steps.start_ns, *own], axis=1)[steps.own_ns != wire.UNKNOWN]
        self._added.append(len(rows))
        self._apart = 1 << max(0, math.ceil(math.log2(max(1, sum(self._added)) / self._most)))
        rows, held = self._sample(rows), self._sample(self._rows)
        kept = min(self._most, max(_FEWEST, 2 * self._every, sum(self._added)))
        self._rows = np.concatenate([held, rows])[-kept:]
        self._fresh += len(rows)

    def publish(self) -> None:
        """Overwrite this rank's key, when enough is new."""
        if self._fresh >= self._every:
            self._store.set(_key(self._rank), self._rows.astype("<i8").tobytes())
            self._fresh = 0

    def say(self, doing: bytes) -> None:
        """Publish what this rank is doing right now: what can still be read when it hangs."""
        self._store.set(f"doing/{self._rank}", doing)

    def gather(self) -> wire.Peers | None:
        """On rank 0: statistics over what all ranks published since the last time, or None where that is too little."""
        keys = [_key(rank) for rank in range(self._world_size)]
        if self._rank != 0 or len(self._news(self._rows)) < self._every or not self._store.check(keys):
            return None
        blobs = self._store.multi_get(keys)
        tables = [self._news(np.frombuffer(blob, "<i8").reshape(-1, COLUMNS)) for blob in blobs]
        if min(map(len, tables)) < self._every:
            return None
        joined = join(tables)
        if len(joined) < self._every:
            return None
        self._seen = int(joined[-1, 0, 0])
        return statistics(joined)

    def _sample(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """A share of the collectives, evenly spread even where their numbers rise by more than one at a time.

        By multiplicative hashing. Those of a smaller share are among those of a larger one.
        """
        return rows[rows[:, 0] * _GOLDEN % 2**32 * self._apart < 2**32]

    def _news(self, table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows that no statistics were made of."""
        return table[table[:, 0] > self._seen]


def join(tables: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Rows of the collectives that every rank has.

    Args:
        tables: One per rank, shape [rows, COLUMNS], ascending in the collective.

    Returns:
        Shape [collectives, ranks, COLUMNS].
    """
    common = tables[0][:, 0]
    for table in tables[1:]:
        common = np.intersect1d(common, table[:, 0])
    return np.stack([table[np.isin(table[:, 0], common)] for table in tables], axis=1)


def statistics(joined: npt.NDArray[np.int64]) -> wire.Peers:
    """Delay, waiting and straggler counts per rank.

    `delay` of a step is the last rank's own time over the median of the other ranks'; the phase is the one in which
    that rank exceeds the others' median most.

    Args:
        joined: Shape [collectives, ranks, COLUMNS] with at least one collective and two ranks.
    """
    steps, ranks, _ = joined.shape
    phases = joined[:, :, 2:].astype(np.float64)
    own = phases.sum(axis=2)
    rows = np.arange(steps)
    last = own.argmax(axis=1)
    others = phases.copy()
    others[rows, last] = np.inf
    excess = phases[rows, last] - np.median(np.sort(others, axis=1)[:, :-1], axis=1)
    delay = own.max(axis=1) - np.median(np.sort(own, axis=1)[:, :-1], axis=1)
    straggles = delay > ALARM_SHARE * np.median(joined[:, :, 1], axis=1)
    phase = excess.argmax(axis=1)

    def per_rank(weights: npt.NDArray[Any]) -> wire.Ints:
        return np.bincount(last, weights=weights, minlength=ranks).astype(np.int64)

    sums = joined.sum(axis=0)
    return wire.Peers(
        first_collective=int(joined[0, 0, 0]),
        last_collective=int(joined[-1, 0, 0]),
        steps=steps,
        rank=np.arange(ranks),
        own_ns=sums[:, 2:].sum(axis=1),
        **{f"own_{name}_ns": sums[:, 2 + index] for index, name in enumerate(wire.OWN_PHASES)},
        delay_ns=per_rank(delay),
        wait_ns=(own.max(axis=1, keepdims=True) - own).sum(axis=0).astype(np.int64),
        **{
            f"straggler_{name}": per_rank((straggles & (phase == index)).astype(np.float64))
            for index, name in enumerate(wire.OWN_PHASES)
        },
    )


def _key(rank: int) -> str:
    return f"own/{rank}"
