"""Agreement of the ranks on the run and the attempt: one rank proposes an identity and answers every request.

A launcher's store may still hold an identity from before a restart, and the clocks of two hosts do not show which entry
is older. So no rank trusts an entry that existed before it came. Each rank sends a request with a fresh nonce, and
accepts the answer to that nonce, or an entry that replaced the one that it found.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

from ddpobs.ranks.hang_report import host_key, process_state
from ddpobs.ranks.run_name import start_ticks

PATIENCE_S = 5.0
"""Seconds a rank waits for an answer before it proposes an identity itself.

If the store holds an older identity, rank 0 waits too, because another rank may have proposed it just now, and the
others wait twice as long. It does not wait if the process that proposed it was on this host and is gone.
"""


class RunIdentity(TypedDict):
    """Identity that the ranks share.

    Attributes:
        run: The run.
        attempt: The attempt.
        parent: Run of the rank that started the training; left out if none did.
        leader: Process that proposed it: the key of its host, its number and its start.
    """

    run: str
    attempt: str
    parent: NotRequired[str]
    leader: NotRequired[list[str | int | None]]


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
        self._older = self._drawn()
        store.set(f"asks/{store.add('asks', 1)}", self._nonce)
        self._requested_at = time.monotonic()

    def poll(self, *, wait: bool = True) -> RunIdentity | None:
        """Return the shared identity once it has arrived at this rank.

        Args:
            wait: Wait for another rank's proposal; else this rank proposes an identity now, unless another one has.
        """
        if self._store.check([f"answers/{self._nonce}"]):
            return self._accept(self._store.get(f"answers/{self._nonce}").decode())
        if (newer := self._drawn()) != self._older:
            return self._accept(newer)
        if wait and time.monotonic() - self._requested_at < self._patience_s:
            return None
        identity = self._propose()
        proposal = json.dumps(identity | {"leader": _this_process()})
        drawn = self._store.compare_set("drawn", self._older, proposal).decode()
        if drawn == proposal:
            self.is_leader, self._proposal = True, proposal
        return self._accept(drawn)

    def _accept(self, text: str) -> RunIdentity:
        self._store.add("read", 1)
        identity: RunIdentity = json.loads(text)
        return identity

    def _drawn(self) -> str:
        return str(self._store.get("drawn").decode()) if self._store.check(["drawn"]) else ""

    def all_have_read(self, ranks: int = 0) -> bool:
        """Answer the open requests, and return whether every rank that asked has read its answer; the leader asks.

        False, too, if fewer than `ranks` have asked.

        True on the other ranks, and for a store that holds an older identity: it outlives the ranks.
        """
        if not self.is_leader or self._older:
            return True
        self.reply_to_others()
        return not self._unanswered and int(self._store.add("read", 0)) >= max(ranks, self._request_count)

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
            return PATIENCE_S if self._older and not _leader_is_gone(self._older) else 0.0
        return 2 * PATIENCE_S if self._older else PATIENCE_S


def _this_process() -> list[str | int | None]:
    return [host_key(), os.getpid(), start_ticks(os.getpid())]


def _leader_is_gone(proposal: str) -> bool:
    """Whether the process that proposed an identity was on this host, and is gone."""
    host, pid, ticks = json.loads(proposal).get("leader", ("", 0, None))
    return host == host_key() and (process_state(pid) == "gone" or start_ticks(pid) != ticks)
