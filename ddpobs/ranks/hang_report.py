"""The verdict on a hang without a collector, from pulses that the ranks publish in the rendezvous store.

Every rank overwrites one key with its latest pulse. A rank that is stuck reads the keys of all ranks; the lowest rank
that still publishes judges, at most one of the first `JUDGES` ranks, so that a large job does not flood the store. A
rank also looks up the processes of ranks on its own host: a stopped and a dead process send nothing alike.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ddpobs import wire
from ddpobs.shared.hang_verdict import BucketLookup, Hang, judge
from ddpobs.shared.judged_rank import JudgedRank
from ddpobs.shared.silence import KEY_SILENCE_NS

JUDGES = 8
"""Ranks that may judge: the lowest of them that still publishes does."""
_STOPPED, _GONE = frozenset("tT"), frozenset("ZXx")


class _Published(msgspec.Struct, frozen=True, array_like=True):
    """The value of a rank's key."""

    count: int
    host: str
    pid: int
    ended: str
    pulse: wire.Pulse | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Published).decode


class HangReport:
    """This rank's part of the verdict.

    Args:
        store: A `torch.distributed.Store` of its own, under a prefix that this attempt alone uses.
        rank: This process's rank.
        world_size: Number of ranks.

    Attributes:
        processes: State of this host's processes that no longer run, by rank; read by `judge`.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._host = host_key()
        self._count = 0
        self._changes: dict[int, tuple[int, int]] = {}
        self.processes: dict[int, str] = {}

    def publish(self, pulse: wire.Pulse | None, ended: str = "") -> None:
        """Overwrite this rank's key.

        Args:
            pulse: The latest pulse.
            ended: `finished`, `interrupted` or `failed` where the process ends.
        """
        self._count += 1
        if pulse is not None and (pulse.stack or pulse.threads):
            pulse = msgspec.structs.replace(pulse, stack=[], threads={})  # The verdict names the place only.
        value = _Published(self._count, self._host, os.getpid(), ended, pulse)
        self._store.set(_key(self._rank), _encode(value))

    def judge(self, buckets: BucketLookup = lambda *_: None) -> Hang | None:
        """Read the ranks' keys and return the verdict; None where another rank judges, or the run goes on.

        Args:
            buckets: Finds a bucket.
        """
        if self._rank >= JUDGES:
            return None
        lower = [self._state(rank) for rank in range(min(self._rank, JUDGES))]
        if any(state is not None and not state.is_silent and not state.ended for state in lower):
            return None
        states = lower + [self._state(rank) for rank in range(self._rank, self._world_size)]
        if any(state is None for state in states):
            return None  # A rank without telemetry has no key.
        return judge([state for state in states if state is not None], buckets)

    def _state(self, rank: int) -> JudgedRank | None:
        key = _key(rank)
        if not self._store.check([key]):
            return None
        published = _decode(self._store.get(key))
        now_ns = time.monotonic_ns()
        count, since_ns = self._changes.get(rank, (-1, now_ns))
        if count != published.count:
            since_ns = now_ns
        self._changes[rank] = published.count, since_ns
        silent_ns = now_ns - since_ns
        process = "" if published.ended or published.host != self._host else process_state(published.pid)
        self.processes.pop(rank, None)
        if process:
            self.processes[rank] = process
        elif silent_ns > KEY_SILENCE_NS:
            process = "silent"
        return JudgedRank(rank, published.pulse, silent_ns, published.ended, process, published.host)


def host_key() -> str:
    """The name of this host and its process numbers: equal in two processes where each can look up the other's."""
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()} {namespace}"


def process_state(pid: int) -> str:
    """`stopped` or `gone` where a process of this host no longer runs; else empty, also on systems without /proc."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    state = text.rpartition(")")[2].split()[0]
    return "stopped" if state in _STOPPED else "gone" if state in _GONE else ""


def _key(rank: int) -> str:
    return f"doing/{rank}"
