"""All exchanges of this rank through the process group's store: identity, pulses and straggler statistics."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.ranks.hang_log import HangLog
from ddpobs.ranks.hang_report import HangReport
from ddpobs.ranks.run_identity import IdentityExchange, RunIdentity
from ddpobs.ranks.run_name import child_run_name, run_name
from ddpobs.ranks.straggler_exchange import Exchange
from ddpobs.shared.hang_verdict import BucketLookup
from ddpobs.torch_seam.stores import StoreConnection

_log = logging.getLogger("ddpobs")
_READ_S = 0.02
_PROMPT_S = 5.0
"""Seconds for which the leader answers requests at every look; afterwards it answers them at a pulse."""


class Rendezvous:
    """This rank's exchanges. No call but `await_readers` waits for another rank.

    The store ends with rank 0's process. Then each further call would print a page on stderr, so the exchanges stop
    before it.

    Args:
        config: The settings.
        rank: This process's rank.
        world_size: Number of ranks.
        generation: Number of this process's telemetry, equal on all ranks.
        on_identity: Receives the shared identity, once.
        buckets: Finds a bucket, for a verdict on a hang.
        compared: The ranks, in rising order, that reduce the first module's gradients together; None for all.
        parents: Returns the runs of the ranks that started this process, by process number, the nearest first.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        rank: int,
        world_size: int,
        generation: int,
        on_identity: Callable[[RunIdentity], None],
        *,
        buckets: BucketLookup = lambda *_: None,
        compared: Sequence[int] | None = None,
        parents: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._generation, self._on_identity = generation, on_identity
        self._buckets, self._parents = buckets, parents
        self._compared = range(world_size) if compared is None else compared
        self._created_at = time.monotonic()
        self._connection: StoreConnection | None = None
        self._store_gone = self._is_unreachable = False
        self._identities: IdentityExchange | None = None
        self._is_identified = False
        self._statistics: Exchange | None = None
        self._hangs: HangReport | None = None
        self._hang_log: HangLog | None = None
        self._calling = threading.RLock()
        """Locked during calls of the store."""

    def open(self) -> None:
        """Connect to the store and request the identity; a store that is not reachable is tried again later.

        Before the first backward, which no rank finishes without this rank: the leader still exists then.
        """
        try:
            default: Any = dist.distributed_c10d._get_default_store()
            self._connection = StoreConnection(default)
            store = self._connection.prefixed(f"ddpobs/meeting/{self._generation}")
            self._identities = IdentityExchange(store, self._rank, self._propose)
        except Exception as error:
            if not self._is_unreachable:
                _log.warning("ddpobs: the ranks' store is not reachable, and is tried again: %s", error)
            self._is_unreachable = True

    def find_identity(self) -> bool:
        """Accept the shared identity when it has arrived; the leader also answers the other ranks.

        Returns:
            Whether no more calls are needed.
        """
        if self._is_store_gone():
            return True
        if self._identities is None:  # The store was not reachable.
            self.open()
            return False
        with self._until_store_is_gone():
            if self._identities is None:  # The process group ends meanwhile.
                return True
            if not self._is_identified:
                identity = self._identities.poll()
                if identity is None:
                    return False
                self._accept(identity)
            self._identities.reply_to_others()
            return not self._identities.is_leader or time.monotonic() - self._created_at >= _PROMPT_S
        return True

    def settle(self) -> None:
        """Accept an identity now, at the end of a process: another rank's, or this rank's own proposal."""
        with self._until_store_is_gone():
            if self._identities is not None and not self._is_identified:
                identity = self._identities.poll(wait=False)
                if identity is not None:
                    self._accept(identity)

    @property
    def processes(self) -> dict[int, str]:
        """State of this host's processes that no longer run, by rank, while this rank stands still."""
        return {} if self._hang_log is None else self._hang_log.processes

    def publish_pulse(self, pulse: wire.Pulse, ended: str = "") -> None:
        """Publish this rank's pulse, which remains readable when it hangs; answer late requests for the identity.

        Args:
            pulse: The latest pulse.
            ended: `finished`, `interrupted` or `failed` where the process ends.
        """
        self._is_store_gone()
        with self._until_store_is_gone():
            if self._identities is not None:
                self._identities.reply_to_others()
            if self._hangs is not None:
                self._hangs.publish(pulse, ended)
        if self._hang_log is not None and not (ended or self._store_gone):
            self._hang_log.follow(pulse)

    def await_readers(self, timeout_s: float, ranks: int = 0) -> None:
        """On the leader, wait until the other ranks have read the identity: the store may end with this process.

        Args:
            timeout_s: Longest wait, in seconds.
            ranks: Number of ranks that are waited for even if they have not asked yet.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._until_store_is_gone():
                if self._identities is None or (self._is_identified and self._identities.all_have_read(ranks)):
                    return
            time.sleep(_READ_S)

    def leave(self, timeout_s: float) -> None:
        """Use the store no more, because the process group ends; the leader waits until the other ranks do so, too.

        A call that is under way when the store ends would print a page. The store of torchrun's agent does not end.
        """
        deadline = time.monotonic() + timeout_s
        self.await_readers(timeout_s)
        identities = self._identities
        if identities is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        if not self._calling.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        try:
            self._store_gone, self._identities, self._statistics, self._hangs = True, None, None, None
            with suppress(dist.DistNetworkError):
                identities.leave()
                while not identities.all_have_left() and time.monotonic() < deadline:
                    time.sleep(_READ_S)
        finally:
            self._calling.release()

    def close(self, timeout_s: float) -> None:
        """End the verdicts on hangs."""
        if self._hang_log is not None:
            self._hang_log.close(timeout_s)

    def add_steps(self, steps: wire.Steps) -> None:
        """Add finished steps to the statistics over ranks."""
        if self._statistics is not None:
            self._statistics.add(steps)

    def compare(self) -> wire.Peers | None:
        """Publish this rank's steps; on the first rank return statistics over the ranks, if enough is new."""
        self._is_store_gone()
        with self._until_store_is_gone():
            if self._statistics is not None:
                self._statistics.publish()
                return self._statistics.gather()
        return None

    def _accept(self, identity: RunIdentity) -> None:
        self._is_identified = True
        name = f"ddpobs/{identity['attempt']}"
        assert self._connection is not None
        store, prefix = self._connection.store, self._connection.prefixed(name)
        self._hangs = HangReport(prefix, self._rank, self._world_size)
        self._hangs.publish(None)

        def connect() -> Any:
            return StoreConnection(store).prefixed(name)

        self._hang_log = HangLog(connect, self._rank, self._world_size, self._buckets)
        if len(self._compared) > 1:
            self._statistics = Exchange(prefix, self._rank, self._compared, self._config.peers_every)
        self._on_identity(identity)

    def _propose(self) -> RunIdentity:
        attempt, parents = secrets.token_hex(8), self._parents()
        if not parents:
            return {"run": self._config.run or run_name(), "attempt": attempt}
        parent = next(iter(parents.values()))
        return {"run": child_run_name(self._config.run, parents), "attempt": attempt, "parent": parent}

    def _is_store_gone(self) -> bool:
        if not self._store_gone and self._connection is not None and self._connection.is_closed():
            self._leave_store()
        return self._store_gone

    def _leave_store(self) -> None:
        self._store_gone, self._identities, self._statistics, self._hangs = True, None, None, None
        _log.info("ddpobs: the ranks' store is gone, and with it the statistics over ranks")

    @contextmanager
    def _until_store_is_gone(self) -> Iterator[None]:
        try:
            with self._calling:
                yield
        except dist.DistNetworkError:
            self._leave_store()
