"""Faults of a Citus cluster under load: workers that stop, and connections cut while a worker commits."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import zstandard

from benchmarks import capacity, loads
from benchmarks.rig import cluster
from ddpobs import wire

_COMMIT = b"COMMIT\0"
_AWAY_S = 2.0
_CUTS = 10
"""Cuts of each kind."""


class CuttingProxy:
    """A TCP proxy in front of a worker, which can cut the next connection at its `COMMIT`.

    Args:
        port: The worker's port.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._armed: bool | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, *, forward: bool) -> None:
        """Cut the next connection that commits: after the worker has the `COMMIT` if `forward`, else before."""
        self.cut.clear()
        self._armed = forward

    def close(self) -> None:
        """Take no further connection."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client:
            try:
                with socket.create_connection(("127.0.0.1", self._target)) as server:
                    self._copy(client, server)
            except OSError:
                return

    def _copy(self, client: socket.socket, server: socket.socket) -> None:
        while True:
            for source in select.select([client, server], [], [])[0]:
                if not (data := source.recv(1 << 20)):
                    return
                if source is client and self._armed is not None and _COMMIT in data:
                    forward, self._armed = self._armed, None
                    if forward:
                        server.sendall(data)
                        server.recv(1 << 20)  # The worker has committed; its answer is lost.
                    self.cut.set()
                    return
                (server if source is client else client).sendall(data)


def send(address: str, load: loads.Load, rank: int, ended: threading.Event, progress: Counter[str]) -> int:
    """Send a rank's batches until `ended`, each again until it is acknowledged; return their number.

    Counts `acknowledged` batches, `refused` attempts, and `repeated` batches, which an earlier attempt had stored.

    Raises:
        RuntimeError: A response was neither an acknowledgement nor 503.
    """
    headers = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}
    with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
        for seq in count():
            if ended.is_set():
                return seq
            body = zstandard.compress(wire.encode(loads.batch(load, rank, seq)), 1)
            path = f"/api/v1/runs/{load.run_of(rank)}/sources/{rank:016x}/batches/{seq}"
            while (answer := client.put(path, content=body)).status_code == 503:
                progress["refused"] += 1
                time.sleep(0.05)
            if answer.status_code not in (200, 201):
                raise RuntimeError(f"a batch was answered {answer.status_code}: {answer.text[:300]}")
            progress["acknowledged"] += 1
            progress["repeated"] += answer.status_code == 200
    raise AssertionError


def measure(programs: Path, folder: Path, user: str, settings: Sequence[str]) -> dict[str, float]:
    """Send eight runs while each worker stops twice and connections are cut at `COMMIT`.

    Returns:
        Counts of `send`; spans `lost` and `doubled`; `prepared` transactions that remain; `longest_s`, the longest time
        from a worker's return, or from a cut, until 40 further batches are acknowledged.
    """
    coordinator, *workers = (cluster.Server(programs, folder / name, user, settings) for name in ("c", "a", "b"))
    proxies = [CuttingProxy(worker.port) for worker in workers]
    load = loads.Load(8, 1, 20, 20, 0.0, 8, tuple(f"run-{number}" for number in range(8)))
    progress, ended = Counter[str](), threading.Event()
    with cluster.running([coordinator, *workers]):
        cluster.join(coordinator, workers, [proxy.port for proxy in proxies])
        cluster.distribute(coordinator)
        with capacity.collector(folder, coordinator.url) as (_, address), ThreadPoolExecutor(load.ranks) as pool:
            sent = [pool.submit(send, address, load, rank, ended, progress) for rank in range(load.ranks)]
            try:
                longest_s = _inject(workers, proxies, lambda: progress["acknowledged"])
            finally:
                ended.set()
            expected = [future.result() * load.steps * load.buckets for future in sent]
            stored = [capacity.stored(address, run) for run in load.runs]
        prepared = sum(len(server.execute("SELECT gid FROM pg_prepared_xacts")) for server in (coordinator, *workers))
    for proxy in proxies:
        proxy.close()
    surplus = [had - due for had, due in zip(stored, expected, strict=True)]
    lost, doubled = -sum(min(0, spans) for spans in surplus), sum(max(0, spans) for spans in surplus)
    counts = {name: progress[name] for name in ("acknowledged", "refused", "repeated")}
    return counts | {"lost": lost, "doubled": doubled, "prepared": prepared, "longest_s": longest_s}


def _inject(workers: list[cluster.Server], proxies: list[CuttingProxy], acknowledged: Callable[[], int]) -> float:
    longest_s = 0.0
    for worker in workers:
        for mode in ("fast", "immediate"):
            _progress(acknowledged)
            worker.stop(mode)
            time.sleep(_AWAY_S)
            worker.start()
            longest_s = max(longest_s, _progress(acknowledged))
    for number in range(2 * _CUTS):
        proxy = proxies[number // 2 % len(proxies)]
        proxy.arm(forward=number % 2 == 0)
        if not proxy.cut.wait(60):
            raise RuntimeError("no transaction committed within a minute")
        longest_s = max(longest_s, _progress(acknowledged))
    return longest_s


def _progress(acknowledged: Callable[[], int]) -> float:
    """Seconds until 40 further batches are acknowledged."""
    began, before = time.monotonic(), acknowledged()
    while acknowledged() < before + 40:
        if time.monotonic() - began > 60:
            raise RuntimeError("no batch was acknowledged within a minute")
        time.sleep(0.01)
    return time.monotonic() - began
