"""Agreement of the ranks on the run and the attempt: one rank proposes an identity and answers every request.

A launcher's store may still hold an identity from before a restart, and the clocks of two hosts do not show which entry
is older. So no rank trusts an entry that exists already. Each rank sends a request with a fresh nonce, and accepts only
the answer to that nonce.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

PATIENCE_S = 5.0
"""Seconds a rank waits for an answer before it proposes an identity itself.

Ranks other than 0 wait twice as long if the store holds an older identity, because rank 0 may be waiting too.
"""


class RunIdentity(TypedDict):
    """Identity that the ranks share.

    Attributes:
        run: The run.
        attempt: The attempt.
        parent: Run of the rank that started the training; left out if none did.
    """

    run: str
    attempt: str
    parent: NotRequired[str]


class IdentityExchange:
    """This rank's side of the agreement. No call waits for another rank.

    Args:
        store: A `torch.distributed.Store` of its own, under a prefix that all ranks' telemetries share.
        rank: This process's rank. Rank 0 proposes, unless it has no telemetry.
        propose: Creates a run and an attempt.

    Attributes:
        is_leader: Whether this rank's proposal is the shared identity.
    """

    def __init__(self, store: Any, rank: int, propose: Callable[[], RunIdentity]) -> None:
        self._store, self._rank, self._propose = store, rank, propose
        self.is_leader, self._proposal = False, ""
        self._unanswered: set[int] = set()
        self._request_count = 0
        self._nonce = secrets.token_hex(8)
        self._older = store.get("drawn").decode() if store.check(["drawn"]) else ""
        store.set(f"asks/{store.add('asks', 1)}", self._nonce)
        self._requested_at = time.monotonic()

    def poll(self) -> RunIdentity | None:
        """Return the shared identity once it has arrived at this rank."""
        if self._store.check([f"answers/{self._nonce}"]):
            answer: RunIdentity = json.loads(self._store.get(f"answers/{self._nonce}"))
            self._store.add("read", 1)
            return answer
        if time.monotonic() - self._requested_at < self._patience_s:
            return None
        identity = self._propose()
        proposal = json.dumps(identity)
        if self._store.compare_set("drawn", self._older, proposal).decode() != proposal:
            return None  # Another rank was faster, and will answer.
        self.is_leader, self._proposal = True, proposal
        self._store.add("read", 1)
        return identity

    def all_have_read(self) -> bool:
        """Answer the open requests, and return whether every rank that asked has read its answer; the leader asks.

        True on the other ranks, and for a store that holds an older identity: it outlives the ranks.
        """
        if not self.is_leader or self._older:
            return True
        self.reply_to_others()
        return not self._unanswered and int(self._store.add("read", 0)) >= self._request_count

    def leave(self) -> None:
        """Note that this rank uses the store no more."""
        self._store.add("left", 1)

    def all_have_left(self) -> bool:
        """Whether every rank that asked uses the store no more, as the leader sees it; True on the other ranks."""
        return not self.is_leader or bool(self._older) or int(self._store.add("left", 0)) >= self._request_count

    def reply_to_others(self) -> None:
        """Answer the open requests, on the leader."""
        if not self.is_leader:
            return
        count = self._store.add("asks", 0)
        self._unanswered.update(range(self._request_count + 1, count + 1))
        self._request_count = count
        for number in sorted(self._unanswered):
            if self._store.check([f"asks/{number}"]):  # Else the rank has counted itself, and is about to write.
                self._store.set(f"answers/{self._store.get(f'asks/{number}').decode()}", self._proposal)
                self._unanswered.discard(number)

    @property
    def _patience_s(self) -> float:
        if self._rank == 0:
            return PATIENCE_S if self._older else 0.0
        return 2 * PATIENCE_S if self._older else PATIENCE_S
