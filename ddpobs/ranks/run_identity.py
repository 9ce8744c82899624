"""Which run and attempt this is: drawn by one rank, and told to each that asks.

A launcher's store may hold what was drawn before a restart, and no two hosts' clocks agree on what is older. So nobody
believes what lies there: each rank asks with a number that it has just made up, and takes the answer to that.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any, TypedDict

PATIENCE_S = 5.0
"""How long a rank waits for somebody who has drawn or will; other ranks than 0 twice as long where something lies in
the store, as rank 0 may be waiting, too."""


class RunIdentity(TypedDict):
    """What the ranks share."""

    run: str
    attempt: str


class IdentityExchange:
    """This rank's end of it. No call waits for another rank.

    Attributes:
        draws: Whether this is the rank that has drawn.

    Args:
        store: A `torch.distributed.Store` of its own, under a prefix that the ranks' telemetries share.
        rank: This process's rank. Rank 0 draws, unless it has no telemetry.
        draw: Makes a run and an attempt up.
    """

    def __init__(self, store: Any, rank: int, draw: Callable[[], RunIdentity]) -> None:
        self._store, self._rank, self._draw = store, rank, draw
        self.is_leader, self._drawn = False, ""
        self._unanswered: set[int] = set()
        self._counted = 0
        self._nonce = secrets.token_hex(8)
        self._found = store.get("drawn").decode() if store.check(["drawn"]) else ""
        store.set(f"asks/{store.add('asks', 1)}", self._nonce)
        self._asked_at = time.monotonic()

    def poll(self) -> RunIdentity | None:
        """What was drawn, once this rank knows it."""
        if self._store.check([f"answers/{self._nonce}"]):
            answer: RunIdentity = json.loads(self._store.get(f"answers/{self._nonce}"))
            return answer
        if time.monotonic() - self._asked_at < self._patience_s:
            return None
        mine = self._draw()
        told = json.dumps(mine)
        if self._store.compare_set("drawn", self._found, told).decode() != told:
            return None  # Another rank was faster, and will answer.
        self.is_leader, self._drawn = True, told
        return mine

    def reply_to_others(self) -> None:
        """Tell whoever has asked, on the rank that has drawn."""
        if not self.is_leader:
            return
        asks = self._store.add("asks", 0)
        self._unanswered.update(range(self._counted + 1, asks + 1))
        self._counted = asks
        for place in sorted(self._unanswered):
            if self._store.check([f"asks/{place}"]):  # Else it has a place, and is about to ask.
                self._store.set(f"answers/{self._store.get(f'asks/{place}').decode()}", self._drawn)
                self._unanswered.discard(place)

    @property
    def _patience_s(self) -> float:
        if self._rank == 0:
            return PATIENCE_S if self._found else 0.0
        return 2 * PATIENCE_S if self._found else PATIENCE_S
