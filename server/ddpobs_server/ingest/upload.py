"""One batch as it was sent over HTTP, and its decoding within every limit."""

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
    "run": {"type": "string", "pattern": f"^{RUN_ID}$", "description": "Name of the run."},
    "source": {"type": "string", "pattern": f"^{NONCE}$", "description": "Id of the process: 16 hexadecimal digits."},
    "seq": {"type": "integer", "minimum": 0, "maximum": 2**48, "description": "Number of the batch in its source."},
}
"""JSON schemas of the path's parameters, which together are a batch's natural key."""
_COLUMN = {"type": "array", "items": {"type": "integer"}}
_REFERENCE = "#/components/schemas/Wire{name}"
_PATTERNS = {name: re.compile(schema.get("pattern", r"^[0-9]{1,15}$")) for name, schema in KEY.items()}


def _openapi_schemas() -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Schemas of a batch and its acknowledgement, and the components they refer to, as OpenAPI 3.0 expects them."""
    kinds = [wire.Batch, wire.Acknowledgement]
    references, schemas = msgspec.json.schema_components(kinds, schema_hook=_column_schema, ref_template=_REFERENCE)
    del schemas["Batch"]["properties"]["packed_spans"]  # In JSON spans are sent as columns.
    schemas |= {kind.__name__: _columns_schema(kind) for kind in (wire.Steps, wire.Spans, wire.Comms)}
    components = {f"Wire{name}": schema | {"title": f"Wire{name}"} for name, schema in schemas.items()}
    return references, json.loads(json.dumps(components).replace(r"\\Z", "$"))  # JavaScript's patterns lack \Z.


def _column_schema(kind: Any) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)} if issubclass(kind, Columns) else dict(_COLUMN)


def _columns_schema(kind: type[Columns]) -> dict[str, Any]:
    properties = {name: dict(_COLUMN) for name in kind.names}
    return {"type": "object", "description": kind.__doc__, "required": kind.required(), "properties": properties}


(BATCH, ACKNOWLEDGEMENT), SCHEMAS = _openapi_schemas()


@dataclass(frozen=True)
class Upload:
    """The undecoded body of a batch.

    Attributes:
        run: Key of the run in the store.
        path: The path's parameters.
        body: The bytes as they were sent.
        content_type: `wire.MSGPACK` or `wire.JSON`.
        encoding: "zstd", or "" for none.
        received_ns: Time of arrival, this collector's wall clock.
        settings: Contain the limits.
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
        """Size after decompression; the limit if the body does not state it.

        Raises:
            Problem: 413 if the size exceeds the limit; 422 if the body is not compressed as announced.
        """
        return body.plain_bytes(self.body, self.encoding, self._limit)

    @cached_property
    def arrival(self) -> Arrival:
        """The decoded and checked batch.

        Raises:
            Problem: 413 or 422, with the fault of the body.
        """
        try:
            plain = self._decompress() if self.encoding else self.body
            batch = wire.decode(plain, self.content_type, self._limit)
        except WireError as error:
            raise Problem(
                422, "Malformed batch", str(error), field=error.field, expected=error.expected, came=str(error.actual)
            ) from None
        limits.check_batch(batch, self.settings)
        for field, expected in self.path.items():
            if (value := str(getattr(batch, field))) != expected:
                detail = f"{field}: expected {expected}, as in the path, got {value}"
                raise Problem(422, "Key mismatch", detail, field=field, expected=expected, came=value)
        if batch.spans is not None and batch.packed_spans is None:
            batch = msgspec.structs.replace(batch, packed_spans=wire.pack_spans(batch.spans))
        if batch.run != self.run:
            batch = msgspec.structs.replace(batch, run=self.run)
        return Arrival(batch, hashlib.sha256(self.body).digest(), len(self.body), self.received_ns)

    @property
    def _limit(self) -> int:
        return int(self.settings.max_batch_mb * 1e6)

    def _decompress(self) -> bytes:
        decompressor = packing.decompressor()
        try:
            if zstandard.frame_content_size(self.body) >= 0:  # `plain_bytes` has checked that size.
                return decompressor.decompress(self.body, allow_extra_data=False)
            with decompressor.stream_reader(self.body) as reader:
                plain = reader.read(self._limit + 1)
        except zstandard.ZstdError as error:
            raise Problem(422, "Malformed batch", f"$: expected zstd, got {error}", field="$") from None
        if len(plain) > self._limit:
            raise body.batch_too_large(self._limit)
        return plain


def batch_key(path: Mapping[str, str]) -> dict[str, str]:
    """The batch's key from the request's path.

    Raises:
        Problem: 422 if a part of it is malformed.
    """
    for name, pattern in _PATTERNS.items():
        if not pattern.fullmatch(path[name]):
            detail = f"path.{name}: expected {pattern.pattern}, got {path[name][:200]!r}"
            raise Problem(422, "Invalid request", detail, field=f"path.{name}")
    return {name: path[name] for name in KEY}


def content_format(request: Request) -> tuple[str, str]:
    """Content type and encoding of the request's body.

    Raises:
        Problem: 415 if either is unsupported.
    """
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type not in (wire.MSGPACK, wire.JSON):
        detail = f"expected {wire.MSGPACK} or {wire.JSON}, got {content_type[:100]!r}"
        raise Problem(415, "Unknown content type", detail)
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "zstd"):
        raise Problem(415, "Unknown content encoding", f"expected zstd or identity, got {encoding[:100]!r}")
    return content_type, encoding.removeprefix("identity")
