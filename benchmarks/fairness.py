"""Measure the latency of a workspace while another workspace is at its limits, against the same without it.

    python -m benchmarks.fairness [--turns 12] [--seconds 6] [--json FILE] [--smoke]

The workspace `loud` has limits of 10 batches and 1 read a second. Its clients, in a process of their own, send as fast
as they are let, hold unfinished bodies beyond its share of the memory, and do not read its large answers. The workspace
`quiet` sends a batch and reads a run every 50 ms. Turns with and without `loud` alternate. The ratio is that of the
medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from ddpobs_server.store import Store

from benchmarks.tenants import Collector, Tenant, tokens
from tests import databases

_PERIOD_S = 0.05
_START_S = 3.0
"""Seconds in which the processes of `loud` start, outside of the measurement."""
_BODIES, _READERS = 86, 16


def quiet_turn(quiet: Tenant, client: httpx.Client, seq: int, seconds: float) -> tuple[list[float], list[float], int]:
    """Send and read for some seconds. Returns the seconds of each batch and of each read, and the next number."""
    sent, read = [], []
    deadline = time.monotonic() + seconds
    while (began := time.monotonic()) < deadline:
        payload = quiet.batch(0, seq)
        sending = time.perf_counter()
        quiet.put(client, payload).raise_for_status()
        reading = time.perf_counter()
        quiet.get(client, "").raise_for_status()
        sent.append(reading - sending)
        read.append(time.perf_counter() - reading)
        seq += 1
        time.sleep(max(0.0, began + _PERIOD_S - time.monotonic()))
    return sent, read, seq


def loud_clients(loud: Tenant, ended: Any) -> None:
    """Send a batch, hold unfinished bodies and unread answers, until the event."""
    payload = loud.batch(1, 0)
    with (
        loud.unfinished_bodies(_BODIES),
        loud.slow_readers(_READERS),
        httpx.Client(timeout=60) as client,
        suppress(httpx.HTTPError),
    ):
        while not ended.is_set():
            loud.put(client, payload)


@contextmanager
def loudness(loud: Tenant) -> Iterator[None]:
    """Run the clients of `loud` for the block."""
    context = multiprocessing.get_context("spawn")
    ended = context.Event()
    tenant = Tenant(
        Collector(loud.collector.folder, loud.collector.database_url, port=loud.collector.port), loud.token, loud.run
    )
    process = context.Process(target=loud_clients, args=(tenant, ended))
    process.start()
    try:
        yield
    finally:
        ended.set()
        process.join(30)


def measure(folder: Path, turns: int, seconds: float) -> dict[str, float]:
    """Return the medians with and without the other workspace, and their ratios."""
    url = databases.sqlite(folder)
    secrets = tokens(url, "quiet", "loud")
    store = Store(url)
    limits = {"batches_per_s": 10.0, "reads_per_s": 1.0}
    store.set_workspace_limits("loud", limits)
    store.close()
    collector = Collector(folder, url)
    collector.start()
    quiet, loud = (Tenant(collector, secret, name) for secret, name in zip(secrets, ("quiet", "loud"), strict=True))
    times: dict[tuple[str, bool], list[float]] = {}
    seq = 0
    try:
        with httpx.Client(timeout=60) as client, httpx.Client(timeout=60) as loud_client:
            for number in range(100):
                while loud.put(loud_client, loud.batch(0, number)).status_code == 429:
                    time.sleep(0.1)
            _, _, seq = quiet_turn(quiet, client, seq, min(2.0, seconds))
            for turn in range(turns):
                is_loud = bool(turn % 2)
                with ExitStack() as stack:
                    if is_loud:
                        stack.enter_context(loudness(loud))
                    time.sleep(_START_S)
                    sent, read, seq = quiet_turn(quiet, client, seq, seconds)
                times.setdefault(("batch", is_loud), []).extend(sent)
                times.setdefault(("read", is_loud), []).extend(read)
    finally:
        collector.end()
    result: dict[str, float] = {}
    for kind in ("batch", "read"):
        alone, beside = (statistics.median(times[kind, is_loud]) for is_loud in (False, True))
        result |= {f"{kind}_alone_ms": alone * 1e3, f"{kind}_beside_ms": beside * 1e3, f"{kind}_ratio": beside / alone}
    return result


def main() -> None:
    """Measure and print a row for each kind of request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of a turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    turns, seconds = (2, 1.0) if options.smoke else (options.turns, options.seconds)
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), turns, seconds)
    print(
        "\n| quiet workspace | alone, ms | beside a workspace at its limits, ms | ratio, at most 1.10 |"
        "\n|---|---|---|---|"
    )
    for kind in ("batch", "read"):
        print(
            f"| {kind} | {result[f'{kind}_alone_ms']:.1f} | {result[f'{kind}_beside_ms']:.1f} "
            f"| {result[f'{kind}_ratio']:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
