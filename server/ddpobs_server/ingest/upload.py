"""What came over HTTP as one batch, and how it becomes one: checked, and within every limit."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import zstandard
from fastapi import Request

from ddpobs import wire
from ddpobs.errors import WireError
from ddpobs.wire import packing
from ddpobs.wire.columns import Columns
from ddpobs.wire.text import NONCE, RUN_ID
from ddpobs_server.ingest import body, limits
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival
from ddpobs_server.web.problems import Problem

KEY: dict[str, dict[str, Any]] = {
    "run": {"type": "string", "pattern": f"^{RUN_ID}$"},
    "source": {"type": "string", "pattern": f"^{NONCE}$"},
    "seq": {"type": "integer", "minimum": 0, "maximum": 2**48},
}
"""A batch's natural key as the path's parameters have it, each a JSON schema."""
_AT = "#/components/schemas/Wire{name}"
_PATTERNS = {name: re.compile(schema.get("pattern", r"^[0-9]{1,15}$")) for name, schema in KEY.items()}


def _documented() -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """A batch and its acknowledgement as JSON schemas that refer to others, and those, as OpenAPI 3.0 has them."""
    kinds = [wire.Batch, wire.Acknowledgement]
    references, schemas = msgspec.json.schema_components(kinds, schema_hook=_columns, ref_template=_AT)
    del schemas["Batch"]["properties"]["packed_spans"]  # JSON has them as columns.
    named = {f"Wire{name}": schema for name, schema in schemas.items()}
    return references, json.loads(json.dumps(named).replace(r"\\Z", "$"))  # JavaScript knows no \Z.


def _columns(kind: Any) -> dict[str, Any]:
    column = {"type": "array", "items": {"type": "integer"}}
    if not issubclass(kind, Columns):
        return column
    return {"type": "object", "required": kind.required(), "properties": dict.fromkeys(kind.names, column)}


(BATCH, ACKNOWLEDGEMENT), SCHEMAS = _documented()


@dataclass(frozen=True)
class Upload:
    """A batch's body that nobody has looked into yet.

    Attributes:
        run: What the store calls the run.
        path: The path's parameters.
        body: As it came.
        content_type: `wire.MSGPACK` or `wire.JSON`.
        encoding: "zstd", or "" for none.
        received_ns: Wall clock of this collector.
        settings: Hold the limits.
    """

    run: str
    path: Mapping[str, str]
    body: bytes
    content_type: str
    encoding: str
    received_ns: int
    settings: Settings

    @cached_property
    def plain_bytes(self) -> int:
        """Size when decompressed; the limit, where the body does not tell.

        Raises:
            Problem: 413, where that is too much; 422, where it is not compressed as it says.
        """
        return body.plain_bytes(self.body, self.encoding, self._limit)

    @cached_property
    def arrival(self) -> Arrival:
        """The batch.

        Raises:
            Problem: 413 or 422; it says what is wrong with the body.
        """
        try:
            plain = self._decompressed() if self.encoding else self.body
            batch = wire.decode(plain, self.content_type, self._limit)
        except WireError as error:
            raise Problem(
                422, "Malformed batch", str(error), field=error.field, expected=error.expected, came=str(error.actual)
            ) from None
        limits.check_batch(batch, self.settings)
        for field, expected in self.path.items():
            if (came := str(getattr(batch, field))) != expected:
                detail = f"{field}: expected {expected}, as in the path, got {came}"
                raise Problem(422, "Key mismatch", detail, field=field, expected=expected, came=came)
        if batch.spans is not None and batch.packed_spans is None:
            batch = msgspec.structs.replace(batch, packed_spans=wire.pack_spans(batch.spans))
        if batch.run != self.run:
            batch = msgspec.structs.replace(batch, run=self.run)
        return Arrival(batch, hashlib.sha256(self.body).digest(), len(self.body), self.received_ns)

    @property
    def _limit(self) -> int:
        return int(self.settings.max_batch_mb * 1e6)

    def _decompressed(self) -> bytes:
        decompressor = packing.decompressor()
        try:
            if zstandard.frame_content_size(self.body) >= 0:  # It is checked to be below the limit.
                return decompressor.decompress(self.body, allow_extra_data=False)
            with decompressor.stream_reader(self.body) as reader:
                plain = reader.read(self._limit + 1)
        except zstandard.ZstdError as error:
            raise Problem(422, "Malformed batch", f"$: expected zstd, got {error}", field="$") from None
        if len(plain) > self._limit:
            raise body.batch_too_large(self._limit)
        return plain


def key(path: Mapping[str, str]) -> dict[str, str]:
    """A batch's key from its request's path.

    Raises:
        Problem: 422, where it is none.
    """
    for name, pattern in _PATTERNS.items():
        if not pattern.fullmatch(path[name]):
            detail = f"path.{name}: expected {pattern.pattern}, got {path[name][:200]!r}"
            raise Problem(422, "Invalid request", detail, field=f"path.{name}")
    return {name: path[name] for name in KEY}


def form(request: Request) -> tuple[str, str]:
    """A body's content type and encoding.

    Raises:
        Problem: 415, for any that is not known.
    """
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type not in (wire.MSGPACK, wire.JSON):
        detail = f"expected {wire.MSGPACK} or {wire.JSON}, got {content_type[:100]!r}"
        raise Problem(415, "Unknown content type", detail)
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "zstd"):
        raise Problem(415, "Unknown content encoding", f"expected zstd or identity, got {encoding[:100]!r}")
    return content_type, encoding.removeprefix("identity")
