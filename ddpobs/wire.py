"""The schema of what travels from a rank to the collector, and the only thing both sides share.

A batch is one `Batch`. As msgpack its integer columns are raw little-endian arrays, delta coded where that is
smaller, and its spans are packed by themselves, as they are kept; as JSON, meant for curl and for tests, columns are
plain lists. Times are integers in nanoseconds of the
sending process's monotonic clock; `Anchor` ties that clock to the wall.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ddpobs import columns, packing
from ddpobs.errors import WireError

VERSION = 2
MSGPACK, JSON = "application/x-msgpack", "application/json"

PHASES = ("data", "forward", "backward", "exposed_comm", "optimizer", "other")
OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Phases in which a rank does its own work; in exposed communication it waits or moves bytes."""
COMM_KINDS = ("buffers", "unused_map", "user")
"""What `Comms.kind` counts into: communication other than gradient buckets."""

SYNCHRONISED, NO_ORIGIN, FOREIGN_COLLECTIVE, RESTING = 1, 2, 4, 8
"""Bits of `Steps.flags`: gradients were reduced; no clean start to measure own time from; something else
synchronised in mid-step; telemetry was off on purpose, to measure its own cost."""

_FORETOLD = (*(f"own_{phase}_ns" for phase in OWN_PHASES), "own_ns", "end_ns")
"""Columns of steps that others foretell, each from those before it."""

UNKNOWN = -1
LONGEST_NS = 30 * 86_400 * 10**9
"""Nothing lasts longer, and a batch tells of no time further from its anchor than this."""
_NEVER = -(2**62)
"""What stands for `UNKNOWN` in a column of differences."""
_PHASES_NS = tuple(f"{phase}_ns" for phase in PHASES)
_OWN_NS = tuple(f"own_{phase}_ns" for phase in OWN_PHASES)
_STRAGGLER = tuple(f"straggler_{phase}" for phase in OWN_PHASES)
_MOST = 2**48
_MOST_INDEX = 2**20 - 1

Ints = columns.Ints
# Python's $ lets a line's end through; clients and browsers take . and .. out of a path.
RunId = Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")]
Nonce = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
Index = Annotated[int, msgspec.Meta(ge=UNKNOWN, lt=2**20)]
_R = TypeVar("_R", bound=msgspec.Struct | columns.Columns)
Scalar = str | int | float | bool | None


class _Record(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Unknown fields are skipped, so that an older collector reads a newer client; compared by identity."""


class Anchor(_Record, frozen=True, kw_only=True):
    """The two clocks of a process, read together."""

    wall_ns: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    monotonic_ns: Nanoseconds


class Hello(_Record, frozen=True, kw_only=True):
    """Who a source is. `settings` are the reducer's and the telemetry's that matter for a diagnosis."""

    host: Name
    pid: Count
    device: Name
    backend: Name
    versions: dict[Name, Name]
    settings: dict[Name, Scalar] = {}


class Parameter(_Record, frozen=True, kw_only=True):
    """A parameter in a bucket; `size` counts elements."""

    name: Name
    size: Count


class Bucket(_Record, frozen=True, kw_only=True):
    """One gradient bucket; its index is its place in `Layout.buckets`."""

    size_bytes: Count
    dtype: Name
    parameters: list[Parameter]


class Layout(_Record, frozen=True, kw_only=True):
    """A DDP module's buckets, in launch order. `comm` names what is done with a full bucket."""

    module: Rank
    name: Name
    revision: Count
    comm: Name
    buckets: list[Bucket]


class Steps(columns.Columns):
    """One row a step. The six phases add up to `end_ns - start_ns`.

    `collective` is the sequence number of the step's synchronised backward within the attempt, by which ranks are
    joined (`UNKNOWN` where none ran). The `own` columns cover the window from the end of the last full
    synchronisation to the readiness of the last bucket, less time blocked in other collectives: what this rank alone
    answers for. They are `UNKNOWN` where the window has no clean start.
    """

    step: Ints
    collective: Ints
    start_ns: Ints
    end_ns: Ints
    data_ns: Ints
    forward_ns: Ints
    backward_ns: Ints
    exposed_comm_ns: Ints
    optimizer_ns: Ints
    other_ns: Ints
    own_ns: Ints
    own_data_ns: Ints
    own_forward_ns: Ints
    own_backward_ns: Ints
    own_optimizer_ns: Ints
    own_other_ns: Ints
    comm_ns: Ints
    micro_steps: Ints
    samples: Ints
    flags: Ints


class Spans(columns.Columns):
    """One row a step and bucket. `started_ns` is `UNKNOWN` where the backend does not tell."""

    step: Ints
    module: Ints
    revision: Ints
    bucket: Ints
    ready_ns: Ints
    launched_ns: Ints
    started_ns: Ints
    done_ns: Ints


class Comms(columns.Columns):
    """Communication other than gradient buckets; `kind` indexes `COMM_KINDS`."""

    step: Ints
    module: Ints
    kind: Ints
    launched_ns: Ints
    done_ns: Ints


class Readiness(_Record, frozen=True, kw_only=True):
    """When each parameter's gradient was ready in one step, in the order of the layout's buckets and parameters."""

    step: Count
    module: Rank
    revision: Count
    ready_ns: Ints


class Unused(_Record, frozen=True, kw_only=True):
    """Parameters without a gradient from this step on, until the next such record of the module."""

    step: Count
    module: Rank
    locally: list[Name]
    globally: list[Name]


class Peers(_Record, frozen=True, kw_only=True):
    """Straggler statistics over a window of collectives, made among the ranks and sent by rank 0. One row a rank.

    `own` columns are sums over the window. `delay_ns` sums the delay this rank caused while last, `wait_ns` what it
    waited for the last. `straggler_<phase>` counts the steps in which it was last by more than a tenth of the step
    and `<phase>` explained most of it.
    """

    first_collective: Count
    last_collective: Count
    steps: Count
    rank: Ints
    own_ns: Ints
    own_data_ns: Ints
    own_forward_ns: Ints
    own_backward_ns: Ints
    own_optimizer_ns: Ints
    own_other_ns: Ints
    delay_ns: Ints
    wait_ns: Ints
    straggler_data: Ints
    straggler_forward: Ints
    straggler_backward: Ints
    straggler_optimizer: Ints
    straggler_other: Ints


class Pulse(_Record, frozen=True, kw_only=True):
    """What the process was doing when its telemetry thread last looked: what is left when a rank hangs."""

    at_ns: Nanoseconds
    phase: Literal["data", "forward", "backward", "exposed_comm", "optimizer", "other"]
    step: Count
    module: Index = UNKNOWN
    bucket: Index = UNKNOWN


class Event(_Record, frozen=True, kw_only=True):
    """Something that happened once: `buckets_rebuilt`, `comm_hook_set`, `records_dropped`, `goodbye`, ..."""

    kind: Name
    at_ns: Nanoseconds
    step: Count = 0
    detail: dict[Name, Scalar] = {}


class Batch(_Record, frozen=True, kw_only=True):
    """The envelope. `(run, source, seq)` is its natural key; `emitted` and `dropped` count records since the start.

    A record is one row of steps, spans or comms, or one of any other kind. `packed_spans` are the spans as
    `pack_spans` packed them; in memory both are there.
    """

    version: Annotated[int, msgspec.Meta(ge=1)]
    run: RunId
    attempt: Nonce
    source: Nonce
    seq: Count
    rank: Rank
    world_size: Size
    emitted: Count
    dropped: Count
    anchor: Anchor
    hello: Hello | None = None
    layouts: list[Layout] = []
    steps: Steps | None = None
    spans: Spans | None = None
    packed_spans: bytes | None = None
    comms: Comms | None = None
    readiness: list[Readiness] = []
    unused: list[Unused] = []
    peers: list[Peers] = []
    pulse: Pulse | None = None
    events: list[Event] = []


class Acknowledgement(_Record, frozen=True, kw_only=True):
    """The collector's answer after commit. It echoes the key, so that a proxy's own 200 is not taken for one."""

    source: Nonce
    seq: Count
    repeated: bool


def encode(batch: Batch) -> bytes:
    """The batch as msgpack, to be compressed by whoever sends it."""
    if batch.spans is not None:
        batch = msgspec.structs.replace(batch, spans=None, packed_spans=pack_spans(batch.spans))
    return _MSGPACK_ENCODER.encode(batch)


def encode_json(batch: Batch) -> bytes:
    """The batch as columnar JSON."""
    return _JSON_ENCODER.encode(msgspec.structs.replace(batch, packed_spans=None))


def pack_spans(spans: Spans) -> bytes:
    """Spans as they travel and are kept: packed columns, a bucket's later times as what passed since the earlier.

    Each of these varies by itself, and where the earlier one differs they would all be large.
    """
    since_launch = np.where(spans.started_ns == UNKNOWN, _NEVER, spans.started_ns - spans.launched_ns)
    return packing.pack(
        spans.by_name()
        | {
            "launched_ns": spans.launched_ns - spans.ready_ns,
            "started_ns": since_launch,
            "done_ns": spans.done_ns - spans.launched_ns,
        }
    )


def unpack_spans(packed: bytes, limit_bytes: int = packing.UNPACKED_BYTES) -> Spans:
    """What `pack_spans` packed.

    Raises:
        WireError: It is no such thing, or more than `limit_bytes` of it.
    """
    spans = packing.unpack_as(Spans, packed, limit_bytes)
    launched, started, done = spans.launched_ns, spans.started_ns, spans.done_ns
    never = started == _NEVER
    launched += spans.ready_ns
    done += launched
    started[:] = np.where(never, UNKNOWN, started + launched)
    return spans


def pack_steps(rank: Ints, steps: Steps) -> bytes:
    """Steps of several ranks as they are kept: packed columns, without what others foretell."""
    known = steps.by_name()
    rests = {f"{name}_rest": known.pop(name) - _foretold(name, known) for name in reversed(_FORETOLD)}
    return packing.pack({"rank": rank, **known, **rests})


def unpack_steps(packed: bytes) -> dict[str, Ints]:
    """The columns that `pack_steps` packed, `rank` among them."""
    found = packing.unpack(packed)
    for name in _FORETOLD:
        if name not in found:  # The first chunks of this kind had every column.
            found[name] = found.pop(f"{name}_rest") + _foretold(name, found)
    return found


def _foretold(name: str, known: Mapping[str, Ints]) -> Ints:
    """What a column is likely to be: always for sums, mostly for a phase's own part."""
    if name == "end_ns":
        return known["start_ns"] + sum(known[f"{phase}_ns"] for phase in PHASES)
    if name == "own_ns":
        return sum((known[f"own_{phase}_ns"] for phase in OWN_PHASES), np.zeros_like(known["step"]))
    return known[name.removeprefix("own_")]


def pack(record: msgspec.Struct) -> bytes:
    """One record's columns as msgpack, as the collector keeps them."""
    return _MSGPACK_ENCODER.encode(record)


def pack_json(record: msgspec.Struct) -> bytes:
    """One record as JSON."""
    return _JSON_ENCODER.encode(record)


def acknowledgement(text: bytes) -> Acknowledgement:
    """The collector's answer.

    Raises:
        msgspec.MsgspecError: It is another text.
    """
    return _ACKNOWLEDGEMENT_DECODER.decode(text)


def unpack(body: bytes, kind: type[_R]) -> _R:
    """What `pack` packed."""
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_dec)


def decode(body: bytes, content_type: str = MSGPACK, limit_bytes: int = packing.UNPACKED_BYTES) -> Batch:
    """A checked batch from its bytes.

    Args:
        body: As `encode` or `encode_json` made it.
        content_type: Which of the two.
        limit_bytes: Most that packed spans may unpack to.

    Raises:
        WireError: The bytes are not a batch; names the first field that is wrong.
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


def check(batch: Batch) -> None:
    """Refuse what no process can have seen.

    Raises:
        WireError: Times out of order, phases that do not add up, a rank outside the world.
    """
    if batch.version > VERSION:
        raise WireError("version", f"at most {VERSION}; upgrade the collector", batch.version)
    if batch.rank >= batch.world_size:
        raise WireError("rank", f"below world_size {batch.world_size}", batch.rank)
    if batch.steps is not None:
        _check_steps(batch.steps, batch.anchor)
    if batch.spans is not None:
        _check_spans(batch.spans, batch.anchor)
    if batch.comms is not None:
        _check_comms(batch.comms, batch.anchor)
    for index, peers in enumerate(batch.peers):
        _check_peers(f"peers[{index}]", peers, batch.world_size)


def records(batch: Batch) -> int:
    """How many records the batch carries, as `emitted` and `dropped` count them."""
    rows = sum(len(record) for record in (batch.steps, batch.spans, batch.comms) if record is not None)
    lists: tuple[list[Any], ...] = (batch.layouts, batch.readiness, batch.unused, batch.peers, batch.events)
    return rows + sum(len(records) for records in lists)


class _Bounds(NamedTuple):
    """The least and the most of each column of a record; those of times lie around the anchor's."""

    least: Ints
    most: Ints
    of_time: npt.NDArray[np.bool_]

    def around(self, anchor: Anchor) -> tuple[Ints, Ints]:
        """What holds for a batch with that anchor."""
        middle = self.of_time * anchor.monotonic_ns
        return self.least + middle, self.most + middle


def _bounds(kind: type[columns.Columns], /, **ranges: tuple[int, int]) -> _Bounds:
    """Columns without a range are times."""
    least, most = np.array([ranges.get(name, (-LONGEST_NS, LONGEST_NS)) for name in kind.names]).T
    return _Bounds(least, most, np.array([name not in ranges for name in kind.names]))


_COUNTED, _KNOWN, _LASTING = (0, _MOST), (UNKNOWN, _MOST), (0, LONGEST_NS)
_OWN = (-LONGEST_NS, LONGEST_NS)
_STEPS_BOUNDS = _bounds(
    Steps,
    collective=_KNOWN,
    own_ns=(UNKNOWN, LONGEST_NS),
    comm_ns=(UNKNOWN, LONGEST_NS),
    **dict.fromkeys(("step", "micro_steps", "samples", "flags"), _COUNTED),
    **dict.fromkeys(_PHASES_NS, _LASTING),
    **dict.fromkeys(_OWN_NS, _OWN),
)
_SPANS_BOUNDS = _bounds(
    Spans,
    step=_COUNTED,
    revision=_COUNTED,
    module=(0, _MOST_INDEX),
    bucket=(0, _MOST_INDEX),
    launched_ns=(-(2**63), 2**63 - 1),  # It is checked to lie between two times.
)
_COMMS_BOUNDS = _bounds(Comms, step=_COUNTED, module=(0, _MOST_INDEX), kind=(0, len(COMM_KINDS) - 1))
_PEERS_BOUNDS = {
    **dict.fromkeys(("own_ns", "delay_ns", "wait_ns", *_OWN_NS), _OWN),
    **dict.fromkeys(_STRAGGLER, _COUNTED),
}
_PHASE_ROWS = slice(Steps.names.index(_PHASES_NS[0]), Steps.names.index(_PHASES_NS[-1]) + 1)


def _check_steps(steps: Steps, anchor: Anchor) -> None:
    _check_bounds("steps", steps, _STEPS_BOUNDS, anchor)
    _require("steps.end_ns", steps.end_ns >= steps.start_ns, "not before start_ns")
    phases_ns = steps.table[_PHASE_ROWS].sum(axis=0)
    _require("steps.other_ns", phases_ns == steps.end_ns - steps.start_ns, "phases that add up to end_ns - start_ns")


def _check_spans(spans: Spans, anchor: Anchor) -> None:
    _check_bounds("spans", spans, _SPANS_BOUNDS, anchor)
    launched, done = spans.launched_ns, spans.done_ns
    _require("spans.launched_ns", launched >= spans.ready_ns, "not before ready_ns")
    _require("spans.done_ns", done >= launched, "not before launched_ns")
    started = (spans.started_ns <= done) | (spans.started_ns == UNKNOWN)
    _require("spans.started_ns", started, f"not after done_ns, or {UNKNOWN} for unknown")


def _check_comms(comms: Comms, anchor: Anchor) -> None:
    _check_bounds("comms", comms, _COMMS_BOUNDS, anchor)
    _require("comms.done_ns", comms.done_ns >= comms.launched_ns, "not before launched_ns")


def _check_peers(field: str, peers: Peers, world_size: int) -> None:
    rows = len(peers.rank)
    for name, (least, most) in {"rank": (0, world_size - 1), **_PEERS_BOUNDS}.items():
        column: Ints = getattr(peers, name)
        if len(column) != rows:
            raise WireError(f"{field}.{name}", f"{rows} values, as in the columns before it", len(column))
        _require_between(f"{field}.{name}", column, least, most)


def _check_bounds(field: str, record: columns.Columns, bounds: _Bounds, anchor: Anchor) -> None:
    if not len(record):
        return
    least, most = bounds.around(anchor)
    low, high = record.table.min(axis=1), record.table.max(axis=1)
    beyond = np.flatnonzero((low < least) | (high > most))
    for place in sorted(beyond, key=bounds.of_time.__getitem__):  # What a wrong phase makes of a time, comes after it.
        column, name = record.table[place], f"{field}.{record.names[place]}"
        if bounds.of_time[place]:  # One that is unknown is at no time.
            near = (column >= least[place]) & (column <= most[place]) | (column == UNKNOWN)
            _require(name, near, "a time within 30 days of the anchor, on the same clock")
        else:
            _require_between(name, column, int(least[place]), int(most[place]))


def _require_between(field: str, column: Ints, least: int, most: int) -> None:
    within = (column >= least) & (column <= most)
    if not within.all():
        row = int(np.argmin(within))
        raise WireError(field, f"{least} to {most}", f"{column[row]} in row {row}")


def _require(field: str, holds: npt.NDArray[np.bool_], expected: str) -> None:
    if not holds.all():
        raise WireError(field, expected, f"another value in row {int(np.argmin(holds))}")


def _field_error(error: msgspec.ValidationError) -> WireError:
    what, _, path = str(error).partition(" - at `")
    field = path.rstrip("`").removeprefix("$.") or "$"
    if isinstance(column := error.__cause__, WireError):
        return WireError(f"{field}.{column.field}", column.expected, column.came)
    return WireError(field, "the wire schema", what)


def _enc_msgpack(value: Any) -> Any:
    return packing.pack_columns(value) if isinstance(value, columns.Columns) else packing.pack_column(_column(value))


def _enc_json(value: Any) -> Any:
    if isinstance(value, columns.Columns):
        return {name: column.tolist() for name, column in value.by_name().items()}
    return _column(value).tolist()


def _column(value: Any) -> Ints:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array or a plain value, got {type(value).__name__}")
    return value


def _dec(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, columns.Columns):
        return packing.unpack_columns(kind, value)
    return packing.unpack_column(value)


# Every record's type is first decoded here, on one thread: two that do so at the same moment end in a segmentation
# fault inside of msgspec (0.22), which looks into a type's fields before the other has filled them in.
_MSGPACK_ENCODER = msgspec.msgpack.Encoder(enc_hook=_enc_msgpack)
_JSON_ENCODER = msgspec.json.Encoder(enc_hook=_enc_json)
_MSGPACK_DECODER = msgspec.msgpack.Decoder(Batch, dec_hook=_dec)
_JSON_DECODER = msgspec.json.Decoder(Batch, dec_hook=_dec)
_ACKNOWLEDGEMENT_DECODER = msgspec.json.Decoder(Acknowledgement)
