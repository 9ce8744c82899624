"""The schema of what travels from a rank to the collector.

A batch is one `Batch`. Times are integers in nanoseconds of the sending process's monotonic clock; `Anchor` ties that
clock to the wall.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ddpobs.wire import columns

VERSION = 2

PHASES = ("data", "forward", "backward", "exposed_comm", "optimizer", "other")
OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Phases in which a rank does its own work; in exposed communication it waits or moves bytes."""
COMM_KINDS = ("buffers", "unused_map", "user")
"""What `Comms.kind` counts into: communication other than gradient buckets."""

SYNCHRONISED, NO_ORIGIN = 1, 2
"""Bits of `Steps.flags`: gradients were reduced; no clean start to measure own time from."""

UNKNOWN = -1

Ints = columns.Ints
# Python's $ lets a line's end through; clients and browsers take . and .. out of a path.
RunId = Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")]
Nonce = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=2**20 - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
Index = Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**20 - 1)]
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
    """What the training thread is doing, as the telemetry thread saw it last: what is left when a rank hangs.

    Attributes:
        at_ns: Time of the look.
        phase: Phase of the open step.
        step: Its number.
        module: Module of the bucket that was launched last, or that the rank waits for.
        bucket: That bucket.
        idle_ns: Time since the rank's last progress: an event, or a new line of Python outside of a wait.
        patience_ns: Time without progress after which the rank counts as stuck.
        activity: `bucket` and `collective` are waits for the other ranks; empty where it was not determined.
        waits_in: Name of the collective, such as `all_reduce` or `barrier`, where the activity is `collective`.
        synchronised: Synchronised backward passes that this rank has begun.
        collectives: Collectives that user code has started.
        place: Innermost lines of the user's code, such as `train.py:57 → dataset.py:31 __getitem__`.
        stack: The training thread's Python frames, outermost first; sent while the rank is stuck.
        processes: State (`stopped`, `gone`) of processes of this host that are neither running nor sleeping, by rank.
    """

    at_ns: Nanoseconds
    phase: Literal["data", "forward", "backward", "exposed_comm", "optimizer", "other"]
    step: Count
    module: Index = UNKNOWN
    bucket: Index = UNKNOWN
    idle_ns: Count = 0
    patience_ns: Count = 0
    activity: Literal["", "data", "bucket", "collective", "checkpoint", "compile", "evaluation", "code"] = ""
    waits_in: Name = ""
    synchronised: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**48)] = UNKNOWN
    collectives: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**48)] = UNKNOWN
    place: Name = ""
    stack: Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=40)] = []
    processes: Annotated[dict[Name, Name], msgspec.Meta(max_length=64)] = {}


class Fingerprint(_Record, frozen=True, kw_only=True):
    """Hashes of one module's replica in one step, equal on every rank of data-parallel training.

    Attributes:
        module: The module.
        synchronised: Synchronised backward passes before the sampled one, by which ranks are joined.
        names: Names of the parameters.
        buffer_names: Names of the buffers.
        gradients: Hash of each parameter's gradient after its reduction, 0 where it had none.
        parameters: Hash of each parameter at the next forward, after the optimizer.
        buffers: Hash of each buffer at the next forward.
    """

    module: Rank
    synchronised: Count
    names: list[Name]
    buffer_names: list[Name]
    gradients: Ints
    parameters: Ints
    buffers: Ints


class Event(_Record, frozen=True, kw_only=True):
    """Something that happened once: `buckets_rebuilt`, `comm_hook_set`, `goodbye`, ..."""

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
    fingerprints: list[Fingerprint] = []
    pulse: Pulse | None = None
    events: list[Event] = []


class Acknowledgement(_Record, frozen=True, kw_only=True):
    """The collector's answer after commit. It echoes the key, so that a proxy's own 200 is not taken for one."""

    source: Nonce
    seq: Count
    repeated: bool


def records(batch: Batch) -> int:
    """How many records the batch carries, as `emitted` and `dropped` count them."""
    rows = sum(len(record) for record in (batch.steps, batch.spans, batch.comms) if record is not None)
    lists: tuple[list[Any], ...] = (
        batch.layouts,
        batch.readiness,
        batch.unused,
        batch.peers,
        batch.fingerprints,
        batch.events,
    )
    return rows + sum(len(records) for records in lists)
