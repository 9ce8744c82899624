"""Measure the latency of a workspace while another workspace is at its limits, against the same without it.

    python -m benchmarks.fairness [--rounds 10] [--seconds 3] [--beside NAME ...] [--json FILE] [--smoke]

The workspace `quiet` sends a batch of 400 spans and reads a run every 50 ms. Each loud workspace has clients in
processes of its own, which send as fast as they are let:

- `many`: 10 batches of 400 spans and 1 read a second; 86 unfinished bodies, and 16 large responses that stay unread.
- `usual`: 20 batches a second of 5,000 spans, as the exporter sends them.
- `largest`: a batch of 96,000 spans every two seconds.
- `unlimited`: eight clients without a limit on their rate. It only has its share of memory and places, and competes for
  the processor. It has no bound.

A round has a turn of `quiet` alone, one of `quiet` alone once more (the noise), and two for each loud workspace: one
beside it, and one while its clients send to another collector on this machine. The latter shows the part of the cost
that the clients cause, as they use the same processors. Each round begins with another turn. A ratio is that of a
round's medians (or its 90th percentiles), one turn over another: the geometric mean over the rounds, with its 95 %
interval.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from ddpobs_server.store import Store

from benchmarks import loads
from benchmarks.pairs import Ratio, ratio
from benchmarks.rig import databases
from benchmarks.tenants import LOAD, Collector, Tenant, tokens

LIMIT = 1.10
ALONE, AGAIN, ELSEWHERE = "alone", "alone once more", "elsewhere"
_PERIOD_S, _BEFORE_S, _AFTER_S = 0.05, 0.7, 0.5
_BODIES, _READERS = 86, 16
_USUAL = loads.flood(1, 1)
_LARGEST = replace(LOAD, steps=2400, buckets=40)
"""2,400 steps with 96,000 spans: nearly the most records that a batch may have."""
Times = dict[str, dict[str, list[list[float]]]]
"""Seconds of each request, by kind of request, turn and round."""


@dataclass(frozen=True)
class Loud:
    """A loud workspace.

    Attributes:
        limits: Its stored limits.
        load: Size of its batches.
        clients: Processes that send.
        holds: Whether it also keeps bodies unfinished and answers unread.
    """

    limits: dict[str, float]
    load: loads.Load
    clients: int = 2
    holds: bool = False


LOUD = {
    "many": Loud({"batches_per_s": 10.0, "reads_per_s": 1.0}, LOAD, holds=True),
    "usual": Loud({"batches_per_s": 20.0}, _USUAL),
    "largest": Loud({"batches_per_s": 0.5}, _LARGEST),
    "unlimited": Loud({}, _USUAL, clients=8),
}


def quiet_turn(quiet: Tenant, client: httpx.Client, seq: int, seconds: float) -> tuple[list[float], list[float]]:
    """Send and read for some seconds. Returns the seconds of each batch and of each read."""
    sent: list[float] = []
    read: list[float] = []
    deadline = time.monotonic() + seconds
    while (began := time.monotonic()) < deadline:
        payload = quiet.batch(0, seq + len(sent))
        sending = time.perf_counter()
        quiet.put(client, payload).raise_for_status()
        reading = time.perf_counter()
        quiet.get(client, "").raise_for_status()
        sent.append(reading - sending)
        read.append(time.perf_counter() - reading)
        time.sleep(max(0.0, began + _PERIOD_S - time.monotonic()))
    return sent, read


def loud_client(tenant: Tenant, loud: Loud, number: int, active: Any, ended: Any) -> None:
    """Send new batches while `active` is set, until `ended` is set; the first client also holds bodies and answers."""
    plain = msgspec.structs.replace(loads.batch(loud.load, number, 0), run=tenant.run)
    seq = 1000
    with httpx.Client(timeout=60) as client:
        while not ended.is_set():
            if not active.wait(0.2):
                continue
            with ExitStack() as stack:
                if loud.holds and number == 0:
                    stack.enter_context(tenant.unfinished_bodies(_BODIES))
                    stack.enter_context(tenant.slow_readers(_READERS))
                while active.is_set() and not ended.is_set():
                    with suppress(httpx.HTTPError):
                        seq += tenant.put(client, loads.later(plain, seq)).is_success


@contextmanager
def loud_clients(tenants: dict[str, Tenant]) -> Iterator[dict[str, Any]]:
    """Start the clients of each turn's loud workspace. Yields the event that makes them send, by turn."""
    context = multiprocessing.get_context("fork")
    ended, active = context.Event(), {turn: context.Event() for turn in tenants}
    processes = [
        context.Process(target=loud_client, args=(tenant, LOUD[tenant.run], number, active[turn], ended))
        for turn, tenant in tenants.items()
        for number in range(LOUD[tenant.run].clients)
    ]
    for process in processes:
        process.start()
    try:
        yield active
    finally:
        ended.set()
        for process in processes:
            process.join(70)


@contextmanager
def sending(active: Any | None) -> Iterator[None]:
    """Let the clients of a loud workspace send during the block; their last requests end after it."""
    if active is not None:
        active.set()
    time.sleep(_BEFORE_S)
    try:
        yield
    finally:
        if active is not None:
            active.clear()
        time.sleep(_AFTER_S)


@contextmanager
def collector(folder: Path, louds: Sequence[str]) -> Iterator[dict[str, Tenant]]:
    """Run a collector. Yields the tenants of `quiet` and of the loud workspaces."""
    folder.mkdir()
    url = databases.sqlite(folder)
    names = ("quiet", *louds)
    secrets = tokens(url, *names)
    store = Store(url)
    for name in louds:
        store.set_workspace_limits(name, LOUD[name].limits)
    store.close()
    running = Collector(folder, url)
    running.start()
    try:
        # Without its process, a collector can be sent to other processes.
        address = Collector(folder, url, port=running.port)
        tenants = {name: Tenant(address, secret, name) for name, secret in zip(names, secrets, strict=True)}
        with httpx.Client(timeout=60) as client:
            for tenant in tenants.values():
                _fill(tenant, client)
        yield tenants
    finally:
        running.end()


def _fill(tenant: Tenant, client: httpx.Client) -> None:
    """Store enough spans for large responses."""
    for number in range(40):
        while tenant.put(client, tenant.batch(0, number)).status_code == 429:
            time.sleep(0.1)


def measure(folder: Path, rounds: int, seconds: float, louds: Sequence[str]) -> Times:
    """Return the times of `quiet` in each turn."""
    turns = [ALONE, AGAIN, *louds, *(f"{name} {ELSEWHERE}" for name in louds)]
    times: Times = {kind: {turn: [] for turn in turns} for kind in ("batch", "read")}
    with ExitStack() as stack:
        here, elsewhere = (stack.enter_context(collector(folder / name, louds)) for name in ("here", "elsewhere"))
        quiet = here["quiet"]
        tenants = {name: here[name] for name in louds} | {f"{name} {ELSEWHERE}": elsewhere[name] for name in louds}
        active = stack.enter_context(loud_clients(tenants))
        client = stack.enter_context(httpx.Client(timeout=60))
        quiet_turn(quiet, client, 100, 4 * _BEFORE_S)
        for number in range(rounds):
            start = number % len(turns)
            for place, turn in enumerate(turns[start:] + turns[:start]):
                with sending(active.get(turn)):
                    sent, read = quiet_turn(quiet, client, 1000 * (1 + number * len(turns) + place), seconds)
                times["batch"][turn].append(sent)
                times["read"][turn].append(read)
    return times


def rows(times: Times, louds: Sequence[str]) -> Iterator[tuple[str, float, list[Ratio]]]:
    """(title, milliseconds, ratios) of each turn and kind of request.

    The ratios are those over `quiet` alone, by medians and by 90th percentiles, and by medians over the turn elsewhere.
    """
    for kind, by_turn in times.items():
        medians, tails = _by_turn(by_turn, statistics.median), _by_turn(by_turn, _percentile_90)
        for turn in (ALONE, AGAIN, *louds):
            ratios = [ratio(medians[turn], medians[ALONE]), ratio(tails[turn], tails[ALONE])] if turn != ALONE else []
            if turn in louds:
                ratios.append(ratio(medians[turn], medians[f"{turn} {ELSEWHERE}"]))
            yield f"{kind}, {turn}", 1e3 * statistics.median(medians[turn][0]), ratios


def _by_turn(
    by_turn: dict[str, list[list[float]]], statistic: Callable[[list[float]], float]
) -> dict[str, list[list[float]]]:
    return {turn: [[statistic(seconds) for seconds in each]] for turn, each in by_turn.items()}


def _percentile_90(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 90))


def main() -> None:
    """Measure and print a row for each kind of request and each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of a turn")
    parser.add_argument("--beside", nargs="+", choices=LOUD, default=list(LOUD))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.seconds, options.beside = 2, 0.2, ["many"]
    with tempfile.TemporaryDirectory() as name:
        times = measure(Path(name), options.rounds, options.seconds, options.beside)
    print(
        f"\n| request, beside | ms | over alone, by medians: at most {LIMIT:.2f} | by 90th percentiles "
        "| over its clients elsewhere |\n|---|---|---|---|---|"
    )
    results: dict[str, dict[str, Any]] = {}
    names = ("over_alone", "percentiles_90_over_alone", "over_elsewhere")
    for title, milliseconds, ratios in rows(times, options.beside):
        columns = [str(value) for value in ratios] + [""] * (len(names) - len(ratios))
        print(f"| {title} | {milliseconds:.2f} | {' | '.join(columns)} |", flush=True)
        results[title] = {"ms": milliseconds} | dict(zip(names, map(vars, ratios), strict=False))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
