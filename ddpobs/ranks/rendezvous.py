"""All exchanges of this rank through the process group's store: identity, activity and straggler statistics."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.ranks.run_identity import IdentityExchange, RunIdentity
from ddpobs.ranks.straggler_exchange import Exchange
from ddpobs.wire.text import RUN_ID_CHARACTERS

_log = logging.getLogger("ddpobs")
_PROMPT_S = 5.0
"""Seconds for which the leader answers requests at every look; afterwards it answers them at a pulse."""


class Rendezvous:
    """This rank's exchanges. No call waits for another rank.

    The store ends with rank 0's process. Then each further call would print a page on stderr, so the exchanges stop.

    Args:
        config: The settings.
        rank: This process's rank.
        world_size: Number of ranks.
        generation: Number of this process's telemetry, equal on all ranks.
        on_identity: Receives the shared identity, once.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        rank: int,
        world_size: int,
        generation: int,
        on_identity: Callable[[RunIdentity], None],
    ) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._generation, self._on_identity = generation, on_identity
        self._created_at = time.monotonic()
        self._store: Any = None
        self._store_gone = False
        self._identities: IdentityExchange | None = None
        self._is_identified = False
        self._statistics: Exchange | None = None

    def open(self) -> None:
        """Connect to the store and request the identity.

        Before the first backward, which no rank finishes without this rank: the leader still exists then.
        """
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = default.clone()
        prefix = PrefixStore(f"ddpobs/meeting/{self._generation}", self._store)
        self._identities = IdentityExchange(prefix, self._rank, self._propose)

    def find_identity(self) -> bool:
        """Accept the shared identity when it has arrived; the leader also answers the other ranks.

        Returns:
            Whether no more calls are needed.
        """
        if self._store_gone:
            return True
        if self._identities is None:  # The store was not reachable.
            self.open()
            return False
        with self._until_store_is_gone():
            if not self._is_identified:
                identity = self._identities.poll()
                if identity is None:
                    return False
                self._accept(identity)
            self._identities.reply_to_others()
            return not self._identities.is_leader or time.monotonic() - self._created_at >= _PROMPT_S
        return True

    def publish_activity(self, activity: bytes) -> None:
        """Publish the activity of this rank, which remains readable when it hangs; answer late requests."""
        with self._until_store_is_gone():
            if self._identities is not None:
                self._identities.reply_to_others()
            if self._statistics is not None:
                self._statistics.publish_activity(activity)

    def add_steps(self, steps: wire.Steps) -> None:
        """Add finished steps to the statistics over ranks."""
        if self._statistics is not None:
            self._statistics.add(steps)

    def compare(self) -> wire.Peers | None:
        """Publish this rank's steps; on rank 0 return statistics over all ranks, if enough is new."""
        with self._until_store_is_gone():
            if self._statistics is not None:
                self._statistics.publish()
                return self._statistics.gather()
        return None

    def _accept(self, identity: RunIdentity) -> None:
        self._is_identified = True
        if self._world_size > 1:
            prefix = PrefixStore(f"ddpobs/{identity['attempt']}", self._store)
            self._statistics = Exchange(prefix, self._rank, self._world_size, self._config.peers_every)
        self._on_identity(identity)

    def _propose(self) -> RunIdentity:
        run = self._config.run or launcher_run_id() or _new_run_id()
        return {"run": run, "attempt": secrets.token_hex(8)}

    @contextmanager
    def _until_store_is_gone(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError:
            self._store_gone, self._identities, self._statistics = True, None, None
            _log.info("ddpobs: the ranks' store is gone, and with it the statistics over ranks")


def launcher_run_id() -> str | None:
    """Return the launcher's run id; None for torchrun's default, which is the word none."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if run in ("", "none") else re.sub(f"[^{RUN_ID_CHARACTERS}]", "-", run)[:128]


def _new_run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
