"""Schema of the data that travels from a rank to the collector.

One message is one `Batch`. Times are integers in nanoseconds of the sending process's monotonic clock. `Anchor` ties
that clock to the wall.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from ddpobs.wire.account import Account
from ddpobs.wire.fields import (
    Count,
    Counts,
    Durations,
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
)
from ddpobs.wire.pulse import Pulse
from ddpobs.wire.rows import Comms, Spans, Steps

VERSION = 2


class Anchor(Record, frozen=True, kw_only=True):
    """The two clocks of a process, read together.

    Attributes:
        wall_ns: Wall clock, as Unix time.
        monotonic_ns: Monotonic clock.
    """

    wall_ns: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    monotonic_ns: Nanoseconds


class Hello(Record, frozen=True, kw_only=True):
    """Identity of a source.

    Attributes:
        host: Name of the host.
        pid: Number of the process on its host.
        device: Device of the rank's model.
        backend: Backend of the process group.
        versions: Versions by name of the program.
        settings: Settings of the reducer and the telemetry that matter for a diagnosis, by name.
    """

    host: Name
    pid: Count
    device: Name
    backend: Name
    versions: dict[Name, Name]
    settings: dict[Name, Scalar] = msgspec.field(default_factory=dict)


class Parameter(Record, frozen=True, kw_only=True):
    """A parameter in a bucket.

    Attributes:
        name: Its name in the module.
        size: Number of elements.
    """

    name: Name
    size: Count


class Bucket(Record, frozen=True, kw_only=True):
    """One gradient bucket, or one collective of a fully sharded unit; its index is its position in `Layout.buckets`.

    Attributes:
        size_bytes: Size of its gradients, or of what the unit's collective gathers or reduces.
        dtype: Type of these.
        parameters: Its parameters, in the order of their gradients.
        kind: `bucket`, or the unit's collective, one of `UNIT_KINDS`.
        unit: Name of the unit; empty for a bucket.
    """

    size_bytes: Count
    dtype: Name
    parameters: list[Parameter]
    kind: Name = "bucket"
    unit: Name = ""


class Layout(Record, frozen=True, kw_only=True):
    """Layout of a DDP module.

    Attributes:
        module: Number of the module in its process.
        name: Name of the module.
        revision: Number of the layout within its module, from 0.
        comm: Name of the communication strategy.
        buckets: Buckets, in launch order.
    """

    module: Rank
    name: Name
    revision: Count
    comm: Name
    buckets: list[Bucket]


class Readiness(Record, frozen=True, kw_only=True):
    """Readiness of each parameter's gradient in one step.

    Attributes:
        step: Number of the step.
        module: Number of the DDP module in its process.
        revision: Number of the layout within its module.
        ready_ns: Readiness of each gradient on the rank's monotonic clock, in the order of the layout's buckets and
            parameters; `UNKNOWN` for a parameter without a gradient.
    """

    step: Count
    module: Rank
    revision: Count
    ready_ns: Ints


class Unused(Record, frozen=True, kw_only=True):
    """Parameters without a gradient from this step on, until the next such record of the module.

    Attributes:
        step: Number of the step.
        module: Number of the DDP module in its process.
        locally: Names of the parameters without a gradient on this rank.
        globally: Names of the parameters without a gradient on all ranks.
    """

    step: Count
    module: Rank
    locally: list[Name]
    globally: list[Name]


class Peers(Record, frozen=True, kw_only=True):
    """Straggler statistics over a window of collectives, computed among the ranks and sent by the first of them.

    The ranks are those that reduce gradients together: all ranks, or the replicas of a pipeline's stage.

    Columns have one row per rank, and are sums over the window. A rank straggles in a step in which it was last by more
    than `STRAGGLER_SHARE` of the step.

    Attributes:
        first_collective: Number of the window's first synchronised backward.
        last_collective: Number of the window's last synchronised backward.
        steps: Number of steps in the window.
        rank: Number of the rank.
        own_ns: Own time.
        own_data_ns: Own time in the phase data.
        own_forward_ns: Own time in the phase forward.
        own_backward_ns: Own time in the phase backward.
        own_optimizer_ns: Own time in the phase optimizer.
        own_other_ns: Own time in no other phase.
        delay_ns: Delay that the rank caused while it was last.
        wait_ns: Time in which the rank waited for the last rank.
        moving_ns: Exposed communication in which the rank waited for none; empty from older clients.
        straggler_data: Number of steps in which the rank straggled, and data explained most of the delay.
        straggler_forward: Number of steps in which the rank straggled, and forward explained most of the delay.
        straggler_backward: Number of steps in which the rank straggled, and backward explained most of the delay.
        straggler_optimizer: Number of steps in which the rank straggled, and the optimizer explained most of the delay.
        straggler_other: Number of steps in which the rank straggled, and no other phase explained most of the delay.
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
    moving_ns: Durations = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))


class Fingerprint(Record, frozen=True, kw_only=True):
    """Hashes of one module's replica in one step, equal on every rank of data-parallel training.

    Attributes:
        module: Number of the DDP module in its process; of shards that only some ranks hold, `replicas_module`.
        synchronised: Number of synchronised backward passes before the sampled one, by which ranks are joined.
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
    """A single occurrence.

    Attributes:
        kind: Kind, such as `buckets_rebuilt`, `comm_hook_set` or `goodbye`.
        at_ns: Time on the rank's monotonic clock.
        step: Number of the step.
        detail: Facts by name.
    """

    kind: Name
    at_ns: Nanoseconds
    step: Count = 0
    detail: dict[Name, Scalar] = msgspec.field(default_factory=dict)


class Batch(Record, frozen=True, kw_only=True):
    """The envelope. `(run, source, seq)` is its natural key.

    A record is a row of steps, spans or comms, or an element of any other kind.

    Attributes:
        version: Version of this schema.
        run: Name of the run.
        attempt: Id of the attempt: 16 hexadecimal digits.
        source: Id of the process: 16 hexadecimal digits.
        seq: Number of the batch within its source, from 0.
        rank: Number of the rank.
        world_size: Number of ranks that the training has.
        emitted: Number of records that the process has made since its start.
        dropped: Number of records that the process has dropped since its start.
        anchor: The two clocks of the process, read together.
        hello: Identity of the source; None in most batches but the first.
        layouts: New layouts of the DDP modules.
        steps: Steps that ended; None without one.
        spans: Communication of the gradient buckets; None without one.
        packed_spans: The same as `pack_spans` packed it; a decoded batch has both.
        comms: Other communication; None without one.
        readiness: Readiness of the parameters' gradients in sampled steps.
        unused: Sets of unused parameters, at each change.
        peers: Comparison of the ranks, sent by rank 0.
        fingerprints: Hashes of the replicas in sampled steps.
        pulse: Activity of the training thread; None without a new look.
        account: The process's wall time by part; None if it is as before.
        events: Events since the batch before.
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
    """The collector's response after commit. It echoes the key, so that a proxy's own 200 does not count as one.

    Attributes:
        source: Id of the process, as in the batch.
        seq: Number of the batch, as in the batch.
        repeated: Whether the same batch had been stored before.
    """

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
