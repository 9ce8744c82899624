"""Schema of the data that travels from a rank to the collector.

One message is one `Batch`. Times are integers in nanoseconds of the sending process's monotonic clock. `Anchor` ties
that clock to the wall.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ddpobs.wire import columns
from ddpobs.wire.columns import Range, added_later
from ddpobs.wire.text import NONCE, STRICT_RUN_ID

VERSION = 2

PHASES = ("data", "forward", "backward", "exposed_comm", "optimizer", "other")
OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Phases in which a rank does its own work; in exposed communication it waits or moves bytes."""
COMM_KINDS = ("buffers", "unused_map", "user")
"""Values that `Comms.kind` indexes: communication other than gradient buckets."""

OUTSIDE_KINDS = ("evaluation", "checkpoint", "after_checkpoint", "waiting")
"""Kinds of time outside of steps: `after_checkpoint` is work between a save and the next event of training, `waiting`
collectives between steps."""

SYNCHRONISED, NO_ORIGIN = 1, 2
"""Bits of `Steps.flags`: gradients were reduced; no clean start to measure own time from."""

UNKNOWN = -1
LONGEST_NS = 30 * 86_400 * 10**9
"""Longest duration in a batch, and largest distance of its times from its anchor: 30 days."""
STRAGGLER_SHARE = 0.1
"""Excess over the other ranks' median own time, as a share of the step, above which a rank straggles in that step.

Ranks (`Peers.straggler_<phase>`) and collector (the finding `straggler`) use the same definition. It is a convention of
this project, written down with its false alarms in docs/diagnostics.md.
"""
_MOST = 2**48
_MOST_INDEX = 2**20 - 1

Ints = columns.Ints
RunId = Annotated[str, msgspec.Meta(pattern=STRICT_RUN_ID)]
Nonce = Annotated[str, msgspec.Meta(pattern=rf"^{NONCE}\Z")]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
CountOrUnknown = Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**62)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=_MOST_INDEX)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
Total = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A sum of nanoseconds."""
Index = Annotated[int, msgspec.Meta(ge=UNKNOWN, le=_MOST_INDEX)]
Scalar = str | int | float | bool | None

# Kinds of column. `checks` refuses values outside of the range.
Times = Annotated[Ints, Range(-LONGEST_NS, LONGEST_NS, is_time=True)]
TimesBetween = Annotated[Ints, Range(-(2**63), 2**63 - 1)]
"""Times that `checks` bounds by the columns beside them."""
Durations = Annotated[Ints, Range(0, LONGEST_NS)]
DurationsOrUnknown = Annotated[Ints, Range(UNKNOWN, LONGEST_NS)]
SignedDurations = Annotated[Ints, Range(-LONGEST_NS, LONGEST_NS)]
Counts = Annotated[Ints, Range(0, _MOST)]
CountsOrUnknown = Annotated[Ints, Range(UNKNOWN, _MOST)]
Indexes = Annotated[Ints, Range(0, _MOST_INDEX)]
CommKinds = Annotated[Ints, Range(0, len(COMM_KINDS) - 1)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Skips unknown fields, so that an older collector reads a newer client. Compares by identity."""


class Anchor(_Record, frozen=True, kw_only=True):
    """The two clocks of a process, read together."""

    wall_ns: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    monotonic_ns: Nanoseconds


class Hello(_Record, frozen=True, kw_only=True):
    """Identity of a source. `settings` are those of the reducer and the telemetry that matter for a diagnosis."""

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
    """One gradient bucket; its index is its position in `Layout.buckets`."""

    size_bytes: Count
    dtype: Name
    parameters: list[Parameter]


class Layout(_Record, frozen=True, kw_only=True):
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


class Readiness(_Record, frozen=True, kw_only=True):
    """Readiness of each parameter's gradient in one step, in the order of the layout's buckets and parameters."""

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
    """Straggler statistics over a window of collectives, computed among the ranks and sent by rank 0.

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


class Machine(_Record, frozen=True, kw_only=True):
    """State of a rank's host and device, at a pulse; a figure that the system does not report is `UNKNOWN`.

    Shares are parts of a thousand since the previous pulse.

    Attributes:
        processors: Processors that this process may use.
        process_permille: Processor time of this process; 1,000 is one processor.
        busy_permille: Part of the host's processor time that was in use.
        steal_permille: Part of the host's processor time that its hypervisor gave to other guests.
        load_milli: Thousand times the host's load average over one minute.
        quota_permille: The control group's processor quota; 1,000 is one processor, `UNKNOWN` without a quota.
        throttled_ns: Time held up by the quota, since the process started.
        memory_bytes: The host's memory.
        available_bytes: Memory that programs can still take.
        resident_bytes: Memory of this process.
        device_busy_permille: Part of the device's time in which a kernel ran.
        device_clock_mhz: Clock of the device's processors.
        device_most_clock_mhz: Their highest clock.
        device_memory_bytes: The device's memory.
        device_used_bytes: Part of it that is in use.
        device_slowdowns: Reasons for which the device lowers its clock, such as `hw_thermal`.
    """

    processors: CountOrUnknown = UNKNOWN
    process_permille: CountOrUnknown = UNKNOWN
    busy_permille: CountOrUnknown = UNKNOWN
    steal_permille: CountOrUnknown = UNKNOWN
    load_milli: CountOrUnknown = UNKNOWN
    quota_permille: CountOrUnknown = UNKNOWN
    throttled_ns: CountOrUnknown = UNKNOWN
    memory_bytes: CountOrUnknown = UNKNOWN
    available_bytes: CountOrUnknown = UNKNOWN
    resident_bytes: CountOrUnknown = UNKNOWN
    device_busy_permille: CountOrUnknown = UNKNOWN
    device_clock_mhz: CountOrUnknown = UNKNOWN
    device_most_clock_mhz: CountOrUnknown = UNKNOWN
    device_memory_bytes: CountOrUnknown = UNKNOWN
    device_used_bytes: CountOrUnknown = UNKNOWN
    device_slowdowns: Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=16)] = []


class CodePlace(_Record, frozen=True, kw_only=True):
    """A place in the code at which looks found the training thread, inside of a step.

    Attributes:
        phase: Phase that its time counts as.
        place: Innermost lines of the user's code, such as `train.py:57 → metrics.py:31 accuracy`; empty where texts are
            not sent.
        calls: Name of the function that the innermost line calls, such as `to`; empty where there is none.
        iterates: A training loop waits there for the next value of an iterator that is not torch's.
        looks: Looks that found it.
    """

    phase: Literal["data", "other"]
    place: Name = ""
    calls: Name = ""
    iterates: bool = False
    looks: Count


class Input(_Record, frozen=True, kw_only=True):
    """Torch's loaders as training used them lately. Counts are halved every 2,048 batches, so that the past fades.

    Attributes:
        iterators: Iterators that training began over a loader.
        creating_ns: Time in their creation.
        batches: Batches that training took.
        fetching_ns: Time until they came.
        closing_ns: Time in ending the workers of iterators that were dropped.
        collating_ns: Time in `collate_fn`, with zero workers.
        workers: Worker processes of the loader in use; `UNKNOWN` before the first batch.
        ahead: Batches that a worker prepares in advance (`prefetch_factor`).
        cpus: Processors that this process may use.
        awaited_ns: Time by the worker whose batch was awaited.
        alone_ns: The part of it in which most of the other workers' batches had already come.
    """

    iterators: Count = 0
    creating_ns: Count = 0
    batches: Count = 0
    fetching_ns: Count = 0
    closing_ns: Count = 0
    collating_ns: Count = 0
    workers: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=_MOST_INDEX)] = UNKNOWN
    ahead: Count = 0
    cpus: Count = 0
    awaited_ns: Annotated[list[Count], msgspec.Meta(max_length=256)] = []
    alone_ns: Annotated[list[Count], msgspec.Meta(max_length=256)] = []


class Pulse(_Record, frozen=True, kw_only=True):
    """Activity of the training thread at the telemetry thread's latest look. It remains readable when a rank hangs.

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
        buffer_broadcasts: Broadcasts of DDP modules' buffers that this rank has begun.
        place: Innermost lines of the user's code, such as `train.py:57 → dataset.py:31 __getitem__`.
        stack: The training thread's Python frames, outermost first; sent while the rank is stuck.
        processes: State (`stopped`, `gone`) of processes of this host that are neither running nor sleeping, by rank.
        machine: State of the host and the device; None from older clients.
        looks: Latest looks at the training thread inside of steps.
        code: Places of these looks, the most frequent ones, in the phases `data` and `other`.
        input: Use of torch's loaders; None before the first batch.
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
    buffer_broadcasts: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**48)] = UNKNOWN
    place: Name = ""
    stack: Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=40)] = []
    processes: Annotated[dict[Name, Name], msgspec.Meta(max_length=64)] = {}
    machine: Machine | None = None
    looks: Count = 0
    code: Annotated[list[CodePlace], msgspec.Meta(max_length=16)] = []
    input: Input | None = None


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


class OutsideInterval(msgspec.Struct, frozen=True, array_like=True):
    """Steps and times between which `total_ns` were spent outside of steps, in one go or in several."""

    first_step: Count
    last_step: Count
    began_ns: Nanoseconds
    ended_ns: Nanoseconds
    total_ns: Total


class Outside(_Record, frozen=True, kw_only=True):
    """Time outside of steps of one kind, since the source began."""

    kind: Literal["evaluation", "checkpoint", "after_checkpoint", "waiting"]
    total_ns: Total
    count: Count
    intervals: Annotated[list[OutsideInterval], msgspec.Meta(max_length=32)] = []


class Account(_Record, frozen=True, kw_only=True):
    """Where the process's wall time went until `until_ns`; the latest account of a source replaces earlier ones.

    The time from `first_step_ns` to `last_step_ns` is the steps' phases, the time outside of steps of each kind,
    `between_ns` and `unrecorded_ns`.

    Attributes:
        started_ns: Start of the process; None if it is not known.
        imported_ns: End of ddpobs's and torch's import.
        ready_ns: Completion of the first DDP module.
        first_step_ns: Start of the first step; None before it has ended.
        last_step_ns: End of the last step; None before it.
        until_ns: End of the account.
        steps: Steps that ended.
        phases_ns: Time of these steps in each phase, in the order of `PHASES`.
        prepare_ns: Time from `ready_ns` to the first step that nothing explains.
        first_batch_ns: Of the phases the first step's data phase.
        compile_ns: Time in torch.compile since the start.
        outside: Time outside of steps, also before the first and after the last step.
        between_ns: Time between steps that nothing explains.
        unrecorded_ns: Time between steps with dropped steps in between.
        open_step_ns: Time of the step under way.
        finished: Training has ended: later time is neither step nor between steps.
        checkpoint_step: Steps that had ended when the latest checkpoint was saved; `UNKNOWN` without a checkpoint.
    """

    started_ns: Nanoseconds | None = None
    imported_ns: Nanoseconds
    ready_ns: Nanoseconds
    first_step_ns: Nanoseconds | None = None
    last_step_ns: Nanoseconds | None = None
    until_ns: Nanoseconds
    steps: Count = 0
    phases_ns: Annotated[list[Total], msgspec.Meta(min_length=6, max_length=6)]
    prepare_ns: Total = 0
    first_batch_ns: Total = 0
    compile_ns: Total = 0
    outside: Annotated[list[Outside], msgspec.Meta(max_length=8)] = []
    between_ns: Total = 0
    unrecorded_ns: Total = 0
    open_step_ns: Total = 0
    finished: bool = False
    checkpoint_step: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**48)] = UNKNOWN


class Event(_Record, frozen=True, kw_only=True):
    """A single occurrence: `buckets_rebuilt`, `comm_hook_set`, `goodbye`, ..."""

    kind: Name
    at_ns: Nanoseconds
    step: Count = 0
    detail: dict[Name, Scalar] = {}


class Batch(_Record, frozen=True, kw_only=True):
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
    account: Account | None = None
    events: list[Event] = []


class Acknowledgement(_Record, frozen=True, kw_only=True):
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
