"""Measure where the writer's processor time goes: the parts of the work on a batch, without HTTP.

    python -m benchmarks.ingest_parts [--rounds 5] [--batches 320] [--json FILE] [--smoke]

One process decodes, checks and stores batches of 5,000 spans in a new SQLite file, eight in a transaction. A part's
time is the process's own in its functions, without that in the functions of other parts. The first round is not
counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import zstandard
from ddpobs_server.ingest import limits
from ddpobs_server.ingest.upload import Upload
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.store.writing import ingest, records
from ddpobs_server.web.memory import retain_freed
from sqlalchemy import Connection

from benchmarks import loads
from benchmarks.tables import rows_of
from ddpobs import wire
from ddpobs.wire import coding

_CLIENTS = 8
"""Each is a rank, and has a batch in each transaction."""
OTHER = "other"
_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "decoding of spans and steps": ((wire, "decode"), (Upload, "_decompress")),
    "checks of every value": ((coding, "check"), (limits, "check_batch")),
    "rows of batches, runs and sources; is each step sent once?": (
        (ingest, "_claim"),
        (ingest, "_touch_runs"),
        (ingest, "_touch_sources"),
        (records, "write"),
    ),
    "packing of steps for the store": ((ingest, "_chunks"),),
    "insertion of chunks": ((ingest, "insert_many"),),
    "sums by bucket, by window and by rank": ((ingest, "_write_sums"),),
    "commit": ((Connection, "_commit_impl"),),
}


class Parts:
    """Processor time by part, in seconds."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts its own time."""

        def timed(*arguments: Any, **named: Any) -> Any:
            began_s = time.process_time()
            self._inner.append(0.0)
            try:
                return call(*arguments, **named)
            finally:
                spent_s = time.process_time() - began_s
                self.seconds[part] += spent_s - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent_s

        return timed


def measure(rounds: int, count: int) -> dict[str, float]:
    """Return the nanoseconds of the processor a span, by part."""
    load = loads.flood(_CLIENTS, max(1, count // _CLIENTS))
    keys = [(rank, seq) for seq in range(load.batches) for rank in range(load.ranks)]
    bodies = [zstandard.compress(wire.encode(loads.batch(load, rank, seq)), 1) for rank, seq in keys]
    paths = [{"run": load.run_of(rank), "source": f"{rank:016x}", "seq": str(seq)} for rank, seq in keys]
    settings, parts = Settings(), Parts()
    with ExitStack() as stack:
        store = Store(f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/runs.db")
        stack.callback(store.close)
        store.migrate()
        for part, functions in _PARTS.items():
            for place, name in functions:
                stack.enter_context(patch.object(place, name, parts.timed(part, getattr(place, name))))
        store_all = parts.timed(OTHER, partial(_store, store))
        for number in range(rounds + 1):
            store_all(
                [
                    Upload(f"run-{number}", path, body, wire.MSGPACK, "zstd", time.time_ns(), settings)
                    for path, body in zip(paths, bodies, strict=True)
                ]
            )
            if not number:
                parts.seconds.clear()
    return {part: 1e9 * parts.seconds[part] / (rounds * load.spans) for part in (*_PARTS, OTHER)}


def _store(store: Store, uploads: Sequence[Upload]) -> None:
    for first in range(0, len(uploads), _CLIENTS):
        store.ingest([upload.arrival for upload in uploads[first : first + _CLIENTS]])


def table(ns_per_span: dict[str, float]) -> str:
    """Return a row for each part, the largest first."""
    total = sum(ns_per_span.values())
    parts = sorted(ns_per_span, key=lambda part: (part == OTHER, -ns_per_span[part]))
    rows = [[part, f"{100 * ns_per_span[part] / total:.0f}"] for part in parts]
    return rows_of(["part", "%"], rows)


def main() -> None:
    """Measure, and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=320)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.batches = 1, 16
    retain_freed()
    found = measure(options.rounds, options.batches)
    print(f"{sum(found.values()):.0f} ns a span\n\n{table(found)}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
