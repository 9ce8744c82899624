"""The loads of a soak: thousands of runs, costly batches, decompression bombs, hostile text, heavy reads left unread.

Each load runs in a process of its own, so that it does not delay the client whose latency is measured. It works on the
collector under test, on another one, or not at all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import zstandard
from ddpobs_server.figures.registry import NAMES
from ddpobs_server.store import Store

from benchmarks import reads
from benchmarks.tenants import LOAD, Tenant, hostile_batches
from ddpobs import wire

CROWD_PREFIX, CROWD_SHAPE = "run-", reads.Shape("crowd", 2, 40, 20, 40)
HOSTILE, TEXT, WIDE = "hostile", "text", "wide"
"""Runs of the workspace `loud`."""
IDLE, HERE, ELSEWHERE = range(3)
"""Where the loads work: nowhere, at the collector under test, at the other one."""
_PAUSE_S, _HELD_S = 0.5, 3.0
_NICE = 19
"""The loads' clients would be on other machines: they take no processor from the collector here."""
_BOMB_BYTES = 100_000_000
_RANKS = 16_384
_RETRY = (408, 429, 503, 507)
NASTY = "\x1b[31m\r\n# HELP owned x\n\"'\\`<script>alert(1)</script>{{7*7}}%s\u202e\0'; DROP TABLE runs; --"
_FIGURES = ("account", "phases", "ranks", "step", "buckets")


def fill_crowd(store: Store, runs: int) -> None:
    """Write finished and silent runs of two ranks into the workspace `crowd`."""
    plain = [reads.batch(CROWD_SHAPE, rank, 0) for rank in range(CROWD_SHAPE.ranks)]
    ends: list[dict[str, Any]] = [{}, {"events": [wire.Event(kind="goodbye", at_ns=0)]}]
    group = []
    for number in range(runs):
        name = f"crowd/{CROWD_PREFIX}{number:05d}"
        group += [reads.arrival(msgspec.structs.replace(sent, run=name, **ends[number % 2])) for sent in plain]
        if len(group) >= 64 or number == runs - 1:
            store.ingest(group)
            group = []


def bombs(good: wire.Batch) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Bodies that a collector must refuse, with their headers, by name; `good` is an acceptable batch without rows."""
    packed, plain = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}, {"Content-Type": wire.MSGPACK}
    zeros = zstandard.compress(bytes(_BOMB_BYTES))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(_BOMB_BYTES))
    claimed = msgspec.msgpack.encode([2**32, {"step": ["<i8", 0, 0, 1, [zeros] * 8]}])
    hidden = zstandard.compress(msgspec.msgpack.encode([3, {"step": ["<i8", 0, 0, 1, [bytes(_BOMB_BYTES)]]}]))
    events = msgspec.msgpack.encode({"events": [{"kind": "a", "at_ns": 0}] * 400_000})
    bombed = msgspec.msgpack.encode([50_000_000, {name: ["<i8", 0, 0, 1, [zeros] * 8] for name in wire.Spans.names}])

    def with_spans(body: bytes) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(wire.encode(good)) | {"packed_spans": body})

    return {
        "a body of 100 MB": (zeros, packed),
        "a body that hides its size": (unsized, packed),
        "a bomb in a frame": (zstandard.compress(zeros), packed),
        "400,000 events": (zstandard.compress(events), packed),
        "spans that claim four billion rows": (with_spans(claimed), plain),
        "spans of 100 MB a column": (with_spans(bombed), plain),
        "three spans whose frame hides 100 MB": (with_spans(hidden), plain),
        "an array of four billion": (b"\xdd\xff\xff\xff\xff", plain),
        "containers without an end": (zstandard.compress(b"\x91" * 15_000_000), packed),
        "JSON without an end": (b"[" * 1_000_000, {"Content-Type": wire.JSON}),
    }


class Load:
    """One process's work.

    Attributes:
        answers: Number of responses by kind of request and status.
        strange: Number of responses that no client should get.

    Args:
        tenants: The workspace that it uses, at the collector under test and at the other one.
        seed: Of its draws.
    """

    def __init__(self, tenants: tuple[Tenant, Tenant], seed: int) -> None:
        self.tenants, self.tenant = tenants, tenants[0]
        self.random, self.answers, self.strange = random.Random(seed), Counter[str](), Counter[str]()
        self._seq = 0

    def work(self, client: httpx.Client, number: int) -> None:
        """Do a part of the work."""
        raise NotImplementedError

    def put(self, client: httpx.Client, payload: wire.Batch) -> None:
        """Send a batch once."""
        kind = payload.run.partition("-")[0]
        self.note(f"batch of {kind}", self.tenant.put(client, payload))

    def get(self, client: httpx.Client, path: str) -> None:
        """Read a path once."""
        url = self.tenant.collector.reading.url + path
        self.note(path.partition("?")[0].removeprefix("/api/v1/"), client.get(url, headers=self.tenant.headers))

    def note(self, what: str, answer: httpx.Response) -> None:
        """Count a response."""
        self.answers[f"{answer.status_code} {what}"] += 1
        if answer.status_code >= 500 and answer.status_code not in _RETRY:
            self.strange[f"{answer.status_code} on {what}: {self._last_error()}"] += 1

    def _last_error(self) -> str:
        """The last exception in the collector's log, in a line."""
        folders = {each.folder for each in (self.tenant.collector, self.tenant.collector.reading)}
        logs = [(folder / "collector.log").read_text(errors="replace") for folder in folders]
        lines = [line for log in logs for line in log.splitlines() if '"exception"' in line]
        return str(json.loads(lines[-1]).get("exception", "")).rpartition("\n")[2][:300] if lines else ""

    def next_seq(self) -> int:
        """The next number of a batch. A process sends its steps in order, and a batch's are those of its number."""
        self._seq += 1
        return self._seq


class Costly(Load):
    """Batches that are costly to keep, runs beyond the limit, a world of 16,384 ranks, and hostile text."""

    def work(self, client: httpx.Client, number: int) -> None:
        """Send a few such batches."""
        for payload in hostile_batches(self.tenant, number + 1):
            self.put(client, payload)
        self.put(client, self.tenant.batch(0, 0, f"{CROWD_PREFIX}{number}"))
        rank = self.random.randrange(_RANKS)
        wide = self.tenant.batch(rank, self.next_seq(), WIDE, world_size=_RANKS, source=f"{rank:016x}")
        self.put(client, msgspec.structs.replace(wide, rank=rank))
        self.put(client, self.text())
        time.sleep(_PAUSE_S)

    def text(self) -> wire.Batch:
        """A batch with hostile text in each name."""
        bucket = wire.Bucket(size_bytes=4, dtype=NASTY, parameters=[wire.Parameter(name=NASTY, size=1)])
        hello = wire.Hello(
            host=NASTY, pid=1, device=NASTY, backend=NASTY, versions={"torch": NASTY}, settings={NASTY: NASTY}
        )
        return self.tenant.batch(
            0,
            self.next_seq(),
            TEXT,
            hello=hello,
            layouts=[wire.Layout(module=0, name=NASTY, revision=0, comm=NASTY, buckets=[bucket] * LOAD.buckets)],
            unused=[wire.Unused(step=0, module=0, locally=[NASTY], globally=[NASTY])],
            events=[wire.Event(kind="sampler_without_set_epoch", at_ns=0, detail={"sampler": NASTY})],
        )


class Bombs(Load):
    """Decompression bombs, each of which must be refused."""

    def __init__(self, tenants: tuple[Tenant, Tenant], seed: int) -> None:
        super().__init__(tenants, seed)
        self._good = msgspec.structs.replace(self.tenant.batch(0, 1, "bombs"), steps=None, spans=None)
        self._bombs = list(bombs(self._good).items())

    def work(self, client: httpx.Client, number: int) -> None:
        """Send the next bomb."""
        name, (body, headers) = self._bombs[number % len(self._bombs)]
        path = f"/api/v1/runs/bombs/sources/{self._good.source}/batches/{self._good.seq}"
        answer = client.put(self.tenant.collector.url + path, content=body, headers=headers | self.tenant.headers)
        self.note(name, answer)
        if answer.is_success:
            self.strange[f"accepted: {name}"] += 1
        time.sleep(_PAUSE_S)


class Crowd(Load):
    """Pulses of thousands of runs, their list page by page, and their metrics."""

    def __init__(self, tenants: tuple[Tenant, Tenant], seed: int, runs: int) -> None:
        super().__init__(tenants, seed)
        self._runs, self._cursor = runs, ""
        self._pulse = msgspec.structs.replace(reads.batch(CROWD_SHAPE, 0, 1), steps=None, spans=None)

    def work(self, client: httpx.Client, number: int) -> None:
        """Send a pulse; now and then read a page of the list or the metrics."""
        run = f"{CROWD_PREFIX}{2 * self.random.randrange(self._runs // 2):05d}"
        self.put(client, msgspec.structs.replace(self._pulse, run=run, seq=self.next_seq()))
        if number % 10 == 0:
            self.get(client, "/metrics?only=runs")
        if number % 10 == 5:
            self._next_page(client)
        time.sleep(_PAUSE_S / 2)

    def _next_page(self, client: httpx.Client) -> None:
        url = f"{self.tenant.collector.reading.url}/api/v1/runs?limit=500{self._cursor}"
        answer = client.get(url, headers=self.tenant.headers)
        self.note("a page of the list", answer)
        following = answer.json()["next"] if answer.is_success else None
        self._cursor = f"&cursor={following}" if following else ""


class Readers(Load):
    """Reports, figures, comparisons and traces, at once and beside readers that leave them unread."""

    def work(self, client: httpx.Client, number: int) -> None:
        """Request each kind of heavy read of one run."""
        run = (HOSTILE, TEXT, WIDE)[number % 3]
        paths = ["/report.html", "/compare?with=" + TEXT, "/trace", "/spans", "/unused", "/account"]
        paths += [f"/figures/{name}{end}" for name in NAMES for end in ("", ".html")]
        path = self.random.choice(paths)
        if number % 8 == 0:
            with replace(self.tenant, run=run).slow_readers(4, path):
                time.sleep(_HELD_S)
            return
        self.get(client, f"/api/v1/runs/{run}{path}")
        time.sleep(_PAUSE_S)


def _process(make: Callable[[], Load], place: Any, ended: Any, results: Any) -> None:
    os.nice(_NICE)
    load, number = make(), 0
    with httpx.Client(timeout=40) as client:
        while not ended.is_set():
            if (now := place.value) == IDLE:
                time.sleep(0.1)
                continue
            load.tenant = load.tenants[now - HERE]
            with suppress(httpx.HTTPError, OSError, ValueError):
                load.work(client, number)
            number += 1
    results.put((dict(load.answers), dict(load.strange)))


@contextmanager
def running(makers: list[Callable[[], Load]]) -> Iterator[tuple[Any, Counter[str], Counter[str]]]:
    """Run loads in processes. Yields where they work, which the caller sets, and the loads' sums, filled at the end."""
    context = multiprocessing.get_context("fork")
    place, ended, results = context.Value("i", IDLE), context.Event(), context.Queue()
    processes = [context.Process(target=_process, args=(make, place, ended, results)) for make in makers]
    answers, strange = Counter[str](), Counter[str]()
    for process in processes:
        process.start()
    try:
        yield place, answers, strange
    finally:
        ended.set()
        for _ in processes:
            with suppress(Exception):
                for total, part in zip((answers, strange), results.get(timeout=70), strict=True):
                    total.update(part)
        for process in processes:
            process.join(10)
            process.kill()
