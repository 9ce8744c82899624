"""Schema of the data that travels from a rank to the collector.

One message is one `Batch`. Times are integers in nanoseconds of the sending process's monotonic clock. `Anchor` ties
that clock to the wall.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ddpobs.wire import columns
from ddpobs.wire.account import Account
from ddpobs.wire.columns import added_later
from ddpobs.wire.fields import (
    UNKNOWN,
    CommKinds,
    Count,
    Counts,
    CountsOrUnknown,
    Durations,
    DurationsOrUnknown,
    Indexes,
    Ints,
    Name,
    Nanoseconds,
    Nonce,
    Rank,
    Record,
    RunId,
    Scalar,
    SignedDurations,
    Size,
    Times,
    TimesBetween,
)
from ddpobs.wire.pulse import Pulse

VERSION = 2


class Anchor(Record, frozen=True, kw_only=True):
    """The two clocks of a process, read together."""

    wall_ns: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    monotonic_ns: Nanoseconds


class Hello(Record, frozen=True, kw_only=True):
    """Identity of a source. `settings` are those of the reducer and the telemetry that matter for a diagnosis."""

    host: Name
    pid: Count
    device: Name
    backend: Name
    versions: dict[Name, Name]
    settings: dict[Name, Scalar] = msgspec.field(default_factory=dict)


class Parameter(Record, frozen=True, kw_only=True):
    """A parameter in a bucket; `size` counts elements."""

    name: Name
    size: Count


class Bucket(Record, frozen=True, kw_only=True):
    """One gradient bucket; its index is its position in `Layout.buckets`."""

    size_bytes: Count
    dtype: Name
    parameters: list[Parameter]


class Layout(Record, frozen=True, kw_only=True):
    """Buckets of a DDP module, in launch order. `comm` names the communication strategy."""

    module: Rank
    name: Name
    revision: Count
    comm: Name
    buckets: list[Bucket]


class Steps(columns.Columns):
    """One row per step. The six phases add up to `end_ns - start_ns`.

    `collective` is the sequence number of the step's synchronised backward within the attempt (`UNKNOWN` if none ran).
    Ranks are joined by it. The `own` columns cover the window from the end of the last full synchronisation to the
    readiness of the last bucket, less time blocked in other collectives: time for which this rank alone is
    responsible. They are `UNKNOWN` if the window has no clean start.

    The last columns explain own time. The kernel's counters of the training thread cover the time from the end of the
    previous synchronised backward to the end of this one. `UNKNOWN` marks a counter that the system does not report.

    `running_ns`: on a processor. `run_delay_ns`: ready to run, without a processor. It includes `throttled_ns`: held up
    by a processor quota of the control group. `preemptions`: involuntary switches to another thread. `major_faults`:
    page faults that read a disk. Both may be read in every eighth step only, and are 0 in between. `collections`,
    `collecting_ns`: garbage collections of the process and their length. `elements`: elements of the inputs' tensors,
    over all micro-steps. `longest`: the largest dimension of an input, without the rows.

    `schedule_ns` is the time in a pipeline's schedule, and `computing_ns` the part of it in forward and backward. Both
    are `UNKNOWN` in a step without a schedule. `send_wait_ns` and `receive_wait_ns` are waits for messages between
    ranks.
    """

    step: Counts
    collective: CountsOrUnknown
    start_ns: Times
    end_ns: Times
    data_ns: Durations
    forward_ns: Durations
    backward_ns: Durations
    exposed_comm_ns: Durations
    optimizer_ns: Durations
    other_ns: Durations
    own_ns: DurationsOrUnknown
    own_data_ns: SignedDurations
    own_forward_ns: SignedDurations
    own_backward_ns: SignedDurations
    own_optimizer_ns: SignedDurations
    own_other_ns: SignedDurations
    comm_ns: DurationsOrUnknown
    micro_steps: Counts
    samples: Counts
    flags: Counts
    running_ns: DurationsOrUnknown = added_later(UNKNOWN)
    run_delay_ns: DurationsOrUnknown = added_later(UNKNOWN)
    preemptions: CountsOrUnknown = added_later(UNKNOWN)
    major_faults: CountsOrUnknown = added_later(UNKNOWN)
    throttled_ns: DurationsOrUnknown = added_later(UNKNOWN)
    collections: CountsOrUnknown = added_later(UNKNOWN)
    collecting_ns: DurationsOrUnknown = added_later(UNKNOWN)
    elements: CountsOrUnknown = added_later(UNKNOWN)
    longest: CountsOrUnknown = added_later(UNKNOWN)
    schedule_ns: DurationsOrUnknown = added_later(UNKNOWN)
    computing_ns: DurationsOrUnknown = added_later(UNKNOWN)
    send_wait_ns: DurationsOrUnknown = added_later(UNKNOWN)
    receive_wait_ns: DurationsOrUnknown = added_later(UNKNOWN)


class Spans(columns.Columns):
    """One row per step and bucket. `started_ns` is `UNKNOWN` if the backend does not report it."""

    step: Counts
    module: Indexes
    revision: Counts
    bucket: Indexes
    ready_ns: Times
    launched_ns: TimesBetween
    started_ns: Times
    done_ns: Times


class Comms(columns.Columns):
    """Communication other than gradient buckets; `kind` indexes `COMM_KINDS`."""

    step: Counts
    module: Indexes
    kind: CommKinds
    launched_ns: Times
    done_ns: Times


class Readiness(Record, frozen=True, kw_only=True):
    """Readiness of each parameter's gradient in one step, in the order of the layout's buckets and parameters."""

    step: Count
    module: Rank
    revision: Count
    ready_ns: Ints


class Unused(Record, frozen=True, kw_only=True):
    """Parameters without a gradient from this step on, until the next such record of the module."""

    step: Count
    module: Rank
    locally: list[Name]
    globally: list[Name]


class Peers(Record, frozen=True, kw_only=True):
    """Straggler statistics over a window of collectives, computed among the ranks and sent by the first of them.

    The ranks are those that reduce gradients together: all ranks, or the replicas of a pipeline's stage.

    One row per rank. The `own` columns are sums over the window. `delay_ns` sums the delay that this rank caused while
    it was last, `wait_ns` its waiting for the last rank. `straggler_<phase>` counts the steps in which it was last by
    more than `STRAGGLER_SHARE` of the step and `<phase>` explained most of the delay.
    """

    first_collective: Count
    last_collective: Count
    steps: Count
    rank: Indexes
    own_ns: SignedDurations
    own_data_ns: SignedDurations
    own_forward_ns: SignedDurations
    own_backward_ns: SignedDurations
    own_optimizer_ns: SignedDurations
    own_other_ns: SignedDurations
    delay_ns: SignedDurations
    wait_ns: SignedDurations
    straggler_data: Counts
    straggler_forward: Counts
    straggler_backward: Counts
    straggler_optimizer: Counts
    straggler_other: Counts


class Fingerprint(Record, frozen=True, kw_only=True):
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


class Event(Record, frozen=True, kw_only=True):
    """A single occurrence: `buckets_rebuilt`, `comm_hook_set`, `goodbye`, ..."""

    kind: Name
    at_ns: Nanoseconds
    step: Count = 0
    detail: dict[Name, Scalar] = msgspec.field(default_factory=dict)


class Batch(Record, frozen=True, kw_only=True):
    """The envelope. `(run, source, seq)` is its natural key; `emitted` and `dropped` count records since the start.

    A record is a row of steps, spans or comms, or an element of any other kind. `packed_spans` are the spans as
    `pack_spans` packed them; a decoded batch has both.
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
    layouts: list[Layout] = msgspec.field(default_factory=list)
    steps: Steps | None = None
    spans: Spans | None = None
    packed_spans: bytes | None = None
    comms: Comms | None = None
    readiness: list[Readiness] = msgspec.field(default_factory=list)
    unused: list[Unused] = msgspec.field(default_factory=list)
    peers: list[Peers] = msgspec.field(default_factory=list)
    fingerprints: list[Fingerprint] = msgspec.field(default_factory=list)
    pulse: Pulse | None = None
    account: Account | None = None
    events: list[Event] = msgspec.field(default_factory=list)


class Acknowledgement(Record, frozen=True, kw_only=True):
    """The collector's answer after commit. It echoes the key, so that a proxy's own 200 does not count as one."""

    source: Nonce
    seq: Count
    repeated: bool


def records(batch: Batch) -> int:
    """Count the records of a batch, as `emitted` and `dropped` count them."""
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
