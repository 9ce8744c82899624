"""Fuzz target: any bytes either are a batch that can be stored and read, or are refused.

`python -m tests.fuzz.target FOLDER [libFuzzer's flags]` runs atheris. Inputs that reach new code stay in the folder.
An input that causes a failure is written to the path of `-artifact_prefix`. Add it to `corpus/`, which tests replay.
"""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zstandard

if TYPE_CHECKING:
    from ddpobs_server.reports.reports import Reports
    from ddpobs_server.store import Store

    from ddpobs import wire

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
LIMIT_BYTES = 2_000_000
MSGPACK, JSON, SPANS = range(3)
"""Format of an input's remaining bytes, given by its first byte."""
_stores: list[tuple[Store, Reports, tempfile.TemporaryDirectory[str]]] = []


def check(data: bytes) -> None:
    """Decode an input. If that succeeds, store the batch and read it back.

    Raises:
        Exception: A defect. A refused input raises nothing.
    """
    from ddpobs_server.ingest import limits
    from ddpobs_server.settings import Settings
    from ddpobs_server.web.problems import Problem

    from ddpobs import wire
    from ddpobs.errors import WireError

    form, body = (data[0] % 3, data[1:]) if data else (0, b"")
    try:
        if form == SPANS:
            wire.unpack_spans(body, LIMIT_BYTES)
            return
        batch = wire.decode(body, (wire.MSGPACK, wire.JSON)[form], LIMIT_BYTES)
        limits.check_batch(batch, Settings())
    except (WireError, Problem):
        return
    store_and_read(batch)


def store_and_read(batch: wire.Batch) -> None:
    """Store an accepted batch, and run every kind of read on it."""
    from ddpobs_server.reports.columns import RunColumns
    from ddpobs_server.reports.reports import Reports
    from ddpobs_server.reports.timeline import RunTimeline
    from ddpobs_server.store import Arrival, Store

    from ddpobs import wire

    if not _stores:
        folder = tempfile.TemporaryDirectory()
        store = Store(f"sqlite:///{folder.name}/fuzz.db")
        store.migrate()
        _stores.append((store, Reports(store), folder))
    store, reports, _ = _stores[0]
    # The run is deleted below, and its attempt may not come back: each input is an attempt of its own.
    batch = msgspec.structs.replace(batch, attempt=secrets.token_hex(8))
    if batch.spans is not None:
        batch = msgspec.structs.replace(batch, packed_spans=wire.pack_spans(batch.spans))
    second = msgspec.structs.replace(batch, rank=(batch.rank + 1) % batch.world_size, source="f" * 16)
    store.ingest([Arrival(arrived, bytes(32), 1, time.time_ns()) for arrived in (batch, second)])
    key = (batch.run, batch.attempt)
    assert store.run(batch.run) is not None
    for read in (store.sources, store.layouts, store.rollups, reports.account):
        read(*key)
    store.bucket_rollups(*key, 100)
    store.aggregates(since_ns=0)
    late = RunColumns(store, *key).stragglers(None, None)
    answers = (
        reports.diagnostics(*key),
        late | {name: late[name].tolist() for name in ("own_ns", "excess_ns")} | {"per_rank": [*late["per_rank"]]},
        [*RunTimeline(store, *key).trace(None, None)["traceEvents"]],
    )
    json.dumps(msgspec.to_builtins(answers), allow_nan=False)
    store.delete(batch.run)


def write_seeds(folder: Path) -> None:
    """Write a batch of every version of the wire and every input of the corpus into a folder."""
    from ddpobs import wire

    for golden in GOLDEN.glob("batch-*.zst"):
        body = zstandard.decompress(golden.read_bytes())
        batch = wire.decode(body)
        assert batch.spans is not None
        forms = {MSGPACK: body, JSON: wire.encode_json(batch), SPANS: wire.pack_spans(batch.spans)}
        for form, data in forms.items():
            (folder / f"{golden.stem}-{form}").write_bytes(bytes([form]) + data)
    for path in HERE.glob("corpus/*"):
        (folder / path.name).write_bytes(path.read_bytes())


def main() -> None:
    """Run the fuzzer on the folder in the first argument."""
    import atheris

    with atheris.instrument_imports(include=["ddpobs.wire", "ddpobs_server.ingest"]):
        import ddpobs_server.ingest.upload  # noqa: F401

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_seeds(folder)
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
