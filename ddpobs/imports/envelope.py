"""The first batch of an imported rank.

Run, attempt and sources have the names that their files give them, so an import that is repeated stores nothing twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import ddpobs
from ddpobs import wire
from ddpobs.wire.endings import IMPORTED
from ddpobs.wire.facts import PipelineFacts

_UNKNOWN = "unknown"


def nonce(*parts: str) -> str:
    """Return an id of 16 hexadecimal digits that these parts alone decide."""
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()[:16]


def hello(
    file_format: str,
    file: str,
    settings: Mapping[str, wire.Scalar] | None = None,
    *,
    host: str = "",
    device: str = "",
    backend: str = "",
) -> wire.Hello:
    """Return the identity of an imported rank; what its file does not tell is empty."""
    return wire.Hello(
        host=host or _UNKNOWN,
        pid=0,
        device=device or _UNKNOWN,
        backend=backend or _UNKNOWN,
        versions={"ddpobs": ddpobs.__version__},
        settings={IMPORTED: file_format, "file": file, **(settings or {})},
    )


def pipeline(facts: PipelineFacts) -> wire.Event:
    """Return what a rank reports of its schedule."""
    return wire.Event(kind="pipeline", at_ns=0, detail={name: getattr(facts, name) for name in facts.__struct_fields__})


def first_batch(
    *, run: str, attempt: str, rank: int, world_size: int, anchor: wire.Anchor, hello: wire.Hello
) -> wire.Batch:
    """Return the first batch of a rank, without records."""
    return wire.Batch(
        version=wire.VERSION,
        run=run,
        attempt=attempt,
        source=nonce(attempt, str(rank)),
        seq=0,
        rank=rank,
        world_size=world_size,
        emitted=0,
        dropped=0,
        anchor=anchor,
        hello=hello,
    )
