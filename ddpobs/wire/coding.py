"""Encoding of batches, and decoding into checked batches."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from ddpobs.errors import WireError
from ddpobs.wire import packing
from ddpobs.wire.checks import check
from ddpobs.wire.columns import Columns
from ddpobs.wire.fields import Ints
from ddpobs.wire.schema import Acknowledgement, Batch
from ddpobs.wire.tables import pack_spans, unpack_spans

MSGPACK, JSON = "application/x-msgpack", "application/json"
_R = TypeVar("_R", bound=msgspec.Struct | Columns)


def encode(batch: Batch) -> bytes:
    """Encode a batch as msgpack; the sender compresses it. What UTF-8 cannot encode becomes a question mark."""
    if batch.spans is not None:
        batch = msgspec.structs.replace(batch, spans=None, packed_spans=pack_spans(batch.spans))
    try:
        return _MSGPACK_ENCODER.encode(batch)
    except UnicodeEncodeError:  # Python keeps a file name's bytes that are not UTF-8 as lone surrogates.
        return _MSGPACK_ENCODER.encode(_as_utf8(batch))


def encode_json(batch: Batch) -> bytes:
    """Encode a batch as columnar JSON."""
    return _JSON_ENCODER.encode(msgspec.structs.replace(batch, packed_spans=None))


def pack(record: msgspec.Struct | Columns) -> bytes:
    """Encode a record's columns as msgpack, the collector's first form of storage."""
    return _MSGPACK_ENCODER.encode(record)


def pack_json(record: msgspec.Struct) -> bytes:
    """Encode a record as JSON."""
    return _JSON_ENCODER.encode(record)


def acknowledgement(text: bytes) -> Acknowledgement:
    """Decode the collector's response.

    Raises:
        msgspec.MsgspecError: The text is not an acknowledgement.
    """
    return _ACKNOWLEDGEMENT_DECODER.decode(text)


def unpack(body: bytes, kind: type[_R]) -> _R:
    """Reverse `pack`."""
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_dec)


def decode(body: bytes, content_type: str = MSGPACK, limit_bytes: int = packing.UNPACKED_BYTES) -> Batch:
    """Decode and check a batch.

    Args:
        body: Result of `encode` or `encode_json`.
        content_type: `MSGPACK` or `JSON`.
        limit_bytes: Limit of the size of the unpacked spans.

    Raises:
        WireError: The bytes are not a valid batch. Names the first wrong field.
    """
    decoder = _MSGPACK_DECODER if content_type == MSGPACK else _JSON_DECODER
    try:
        batch = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError("$", f"a batch as {content_type}", error) from None
    except RecursionError:
        raise WireError("$", f"a batch as {content_type}", "one nested too deeply") from None
    if batch.packed_spans is not None:
        batch = msgspec.structs.replace(batch, spans=unpack_spans(batch.packed_spans, limit_bytes))
    check(batch)
    return batch


def _as_utf8(value: Any) -> Any:
    """A copy of a record whose texts UTF-8 can encode."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, msgspec.Struct):
        fields = {name: _as_utf8(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, dict):
        return {_as_utf8(key): _as_utf8(item) for key, item in value.items()}
    return [_as_utf8(item) for item in value] if isinstance(value, list | tuple) else value


def _field_error(error: msgspec.ValidationError) -> WireError:
    reason, _, path = str(error).partition(" - at `")
    field = path.rstrip("`").removeprefix("$.") or "$"
    if isinstance(column := error.__cause__, WireError):
        return WireError(f"{field}.{column.field}", column.expected, column.actual)
    return WireError(field, "the wire schema", reason)


def _enc_msgpack(value: Any) -> Any:
    return packing.pack_columns(value) if isinstance(value, Columns) else packing.pack_column(_column(value))


def _enc_json(value: Any) -> Any:
    if isinstance(value, Columns):
        return {name: column.tolist() for name, column in value.by_name().items()}
    return _column(value).tolist()


def _column(value: Any) -> Ints:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array or a plain value, got {type(value).__name__}")
    return value


def _dec(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Columns):
        return packing.unpack_columns(kind, value)
    return packing.unpack_column(value)


# Each record's type is first decoded here, on one thread. Two threads that do so at the same moment cause a
# segmentation fault in msgspec (0.22), which reads a type's fields before the other thread has filled them in.
_MSGPACK_ENCODER = msgspec.msgpack.Encoder(enc_hook=_enc_msgpack)
_JSON_ENCODER = msgspec.json.Encoder(enc_hook=_enc_json)
_MSGPACK_DECODER = msgspec.msgpack.Decoder(Batch, dec_hook=_dec)
_JSON_DECODER = msgspec.json.Decoder(Batch, dec_hook=_dec)
_ACKNOWLEDGEMENT_DECODER = msgspec.json.Decoder(Acknowledgement)
