"""Events of a trace in Chrome's JSON format, a piece at a time: a file of gigabytes takes bounded memory.

The format: an object with the list `traceEvents`, or that list alone (Trace Event Format, section "JSON Object Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).

A piece ends between two events. JSON that is cut there and closed by a bracket is valid, and cut anywhere else, inside
of a string or of a nested list, it is not. So the decoder itself tells whether a place between `}` and `{` is one.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import msgspec

from ddpobs.errors import TraceFileError

_GzipFile: Any
_DeflateError: Any
try:
    from isal import igzip, isal_zlib

    _GzipFile, _DeflateError = igzip.IGzipFile, isal_zlib.error
except ImportError:  # It has no wheel for this processor.
    _GzipFile, _DeflateError = gzip.GzipFile, zlib.error

_PIECE_BYTES = 128 * 2**10
"""Much larger pieces are read more slowly: their events do not fit into a processor's cache."""
_MAX_READ_BYTES = 4 * 2**20
_MAX_HEADER_BYTES = 16 * 2**20
_MAX_EVENT_BYTES = 16 * 2**20
_MAX_CUTS = 4
"""Places at which a piece is tried to be cut, from its end on. If all are inside of an event, more is read."""
_GZIP = b"\x1f\x8b"
_LIST = b'"traceEvents"'


Event = TypeVar("Event")
_Event_co = TypeVar("_Event_co", covariant=True)
_REST: Any = msgspec.json.Decoder(dict[str, msgspec.Raw])


class EventDecoder(Protocol[_Event_co]):
    """Decodes lists of events."""

    def decode(self, text: bytes, /) -> Sequence[_Event_co]:
        """Decode a list of events."""
        ...


class TraceEvents(Generic[Event]):
    """The events of one file.

    Args:
        path: The file, plain or gzip.
        decoder: Decodes a list of events, as `msgspec.json.Decoder(list[Event])` does.
        read: Is called with the number of further bytes of the file that were read.

    Attributes:
        header: The document's other fields by name, as JSON; complete once all events were read.
    """

    def __init__(
        self, path: Path, decoder: EventDecoder[Event], read: Callable[[int], object] = lambda _: None
    ) -> None:
        self._path, self._decoder, self._read = path, decoder, read
        self._count = 0
        self.header: dict[str, msgspec.Raw] = {}

    def pieces(self) -> Iterator[Sequence[Event]]:
        """Yield the events in the order of the file.

        Raises:
            TraceFileError: The file is no trace, or is cut off.
        """
        try:
            with self._path.open("rb") as file:
                is_packed = file.read(2) == _GZIP
                file.seek(0)
                stream: Any = _GzipFile(fileobj=file) if is_packed else file
                yield from self._split(stream, file)
        except (EOFError, _DeflateError, gzip.BadGzipFile) as error:
            raise TraceFileError(self._path, "a whole gzip file", f"one that ends or breaks inside: {error}") from None
        except OSError as error:
            raise TraceFileError(self._path, "a file", error.strerror or str(error)) from None

    def _split(self, stream: BinaryIO, file: BinaryIO) -> Iterator[Sequence[Event]]:
        rest, at = self._begin(stream), 0
        while more := _more(stream, rest):
            self._read(file.tell() - at)
            at = file.tell()
            rest += more
            events, rest = self._cut(rest)
            yield events
        self._read(file.tell() - at)
        yield self._end(rest)

    def _begin(self, stream: BinaryIO) -> bytes:
        """Read up to the first event, and return what was read from there on."""
        text = b""
        while more := _more(stream, text):
            text += more
            if text.lstrip()[:1] == b"[":
                return text.lstrip()[1:]
            if (found := text.find(_LIST)) >= 0 and (opens := text.find(b"[", found)) >= 0:
                self._keep_header(text[:found].rstrip().rstrip(b",") + b"}")
                return text[opens + 1 :]
            if len(text) > _MAX_HEADER_BYTES:
                break
        raise TraceFileError(self._path, 'a list of events, or an object with "traceEvents"', _shown(text))

    def _keep_header(self, text: bytes) -> None:
        try:
            self.header.update(_REST.decode(text))
        except (msgspec.DecodeError, RecursionError) as error:
            raise TraceFileError(self._path, "a JSON object", error) from None

    def _cut(self, text: bytes) -> tuple[Sequence[Event], bytes]:
        """Return the events of the text up to the last place between two events, and the text from there on."""
        end = len(text)
        for _ in range(_MAX_CUTS):
            end = text.rfind(b"}", 0, end)
            if end < 0:
                break
            following = text[end + 1 : end + 65].lstrip()
            if following[:1] == b"," and following[1:].lstrip()[:1] == b"{":
                try:
                    events = self._decoder.decode(b"".join((b"[", memoryview(text)[: end + 1], b"]")))
                except msgspec.ValidationError as error:
                    raise self._wrong_event(error) from None
                except (msgspec.DecodeError, RecursionError):
                    continue
                self._count += len(events)
                return events, text[text.index(b",", end) + 1 :]
        if len(text) > _MAX_EVENT_BYTES:
            raise TraceFileError(self._path, "events of at most 16 MiB", f"{self._where} one that does not end there")
        return [], text

    def _end(self, text: bytes) -> Sequence[Event]:
        """Return the last events; what follows their list belongs to the header."""
        closing = len(text)
        for _ in range(_MAX_CUTS):
            closing = text.rfind(b"]", 0, closing)
            if closing < 0:
                break
            try:
                events = self._decoder.decode(b"[" + text[: closing + 1])
            except msgspec.ValidationError as error:
                raise self._wrong_event(error) from None
            except (msgspec.DecodeError, RecursionError):
                continue
            self._count += len(events)
            after = text[closing + 1 :].strip()
            if after not in (b"", b"}"):
                self._keep_header(b"{" + after.removeprefix(b","))
            return events
        raise TraceFileError(self._path, "a whole list of events", f"{self._where} none of its ends")

    def _wrong_event(self, error: Exception) -> TraceFileError:
        """A wrong value precedes every place at which the text may be cut, so it is none of the cut's making."""
        return TraceFileError(self._path, "a list of trace events", f"{self._where}: {error}")

    @property
    def _where(self) -> str:
        return f"after {self._count:,} events"


def _more(stream: BinaryIO, text: bytes) -> bytes:
    """Read on, as much again while the text has no place to cut: it is searched anew each time."""
    return stream.read(min(max(_PIECE_BYTES, len(text)), _MAX_READ_BYTES))


def _shown(text: bytes) -> str:
    return f"{text[:40].decode(errors='replace')!r}" if text else "an empty file"
