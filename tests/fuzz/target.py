"""What a fuzzer calls: bytes from anywhere are a batch that can be stored and read, or are refused. Nothing else.

`python -m tests.fuzz.target FOLDER [libFuzzer's flags]` runs atheris; what it finds interesting stays in the folder,
what breaks the promise is written where `-artifact_prefix` says: it belongs into `corpus/`, which the tests replay.
"""

from __future__ import annotations

import json
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
"""An input's first byte: what the others are."""
_stores: list[tuple[Store, Reports, tempfile.TemporaryDirectory[str]]] = []


def check(data: bytes) -> None:
    """Decode, and where that is possible store and read back.

    Raises:
        Exception: A defect. Refusals are none.
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
    """What was accepted is stored, and every read of it is answered."""
    from ddpobs_server.reports.reports import Reports
    from ddpobs_server.store import Arrival, Store

    from ddpobs import wire

    if not _stores:
        folder = tempfile.TemporaryDirectory()
        store = Store(f"sqlite:///{folder.name}/fuzz.db")
        store.migrate()
        _stores.append((store, Reports(store), folder))
    store, reports, _ = _stores[0]
    if batch.spans is not None:
        batch = msgspec.structs.replace(batch, packed_spans=wire.pack_spans(batch.spans))
    other = msgspec.structs.replace(batch, rank=(batch.rank + 1) % batch.world_size, source="f" * 16)
    store.ingest([Arrival(one, bytes(32), 1, time.time_ns()) for one in (batch, other)])
    key = (batch.run, batch.attempt)
    assert store.run(batch.run) is not None
    for read in (store.sources, store.layouts, store.rollups, store.bucket_rollups):
        read(*key)
    store.aggregates(since_ns=0)
    answers = (reports.diagnostics(*key), reports.stragglers(*key, None, None), reports.trace(*key, None, None))
    json.dumps(msgspec.to_builtins(answers), allow_nan=False)
    store.delete(batch.run)


def seeds(folder: Path) -> None:
    """Write what every version of the wire sent into a folder, and every case that was found."""
    from ddpobs import wire

    for golden in GOLDEN.glob("batch-*.zst"):
        body = zstandard.decompress(golden.read_bytes())
        batch = wire.decode(body)
        assert batch.spans is not None
        forms = {MSGPACK: body, JSON: wire.encode_json(batch), SPANS: wire.pack_spans(batch.spans)}
        for form, data in forms.items():
            (folder / f"{golden.stem}-{form}").write_bytes(bytes([form]) + data)
    for found in HERE.glob("corpus/*"):
        (folder / found.name).write_bytes(found.read_bytes())


def main() -> None:
    """Fuzz."""
    import atheris

    with atheris.instrument_imports(include=["ddpobs.wire", "ddpobs_server.ingest"]):
        import ddpobs_server.ingest.upload  # noqa: F401

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    seeds(folder)
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
