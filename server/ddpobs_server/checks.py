"""Whether a collector could run here."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import make_url

from ddpobs_server.store import Store

_FREE_BYTES = 10**9
_SKEW_S = 5.0


def run(database_url: str) -> Iterator[tuple[str, str, bool]]:
    """Each check's name, what it found, and whether that is fine; the later ones need the earlier."""
    url = make_url(database_url)
    store = Store(database_url)
    try:
        store.ready()
    except Exception as error:
        yield "database", f"{url.render_as_string()} does not answer: {type(error).__name__}: {error}", False
        return
    yield "database", f"{url.render_as_string()} answers", True
    here, wanted = store.revisions()
    known = here is None or here <= (wanted or "")
    answer = f"at {here or 'nothing yet'}, this version's is {wanted}"
    yield "schema", answer if known else f"{answer}: a newer version made it", known
    yield "writing", *_writes(store)
    if url.get_backend_name() == "sqlite" and url.database:
        free = shutil.disk_usage(Path(url.database).resolve().parent).free
        yield "disk", f"{free / 1e9:.1f} GB free", free > _FREE_BYTES
    skew_s = store.now_ns() / 1e9 - time.time()
    yield "clock", f"{skew_s:+.1f} s between the database's and this machine's", abs(skew_s) < _SKEW_S
    store.close()


def _writes(store: Store) -> tuple[str, bool]:
    try:
        store.migrate()
        store.try_write()
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    return "the schema is this version's, and rows can be written", True
