"""Facts of events: a form for the detail of each kind.

The collector refuses a batch with a fact of another type. What earlier versions stored is read with the form's defaults
in place of absent and wrong facts. Facts that a form does not name are stored, and nothing computes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from ddpobs.errors import WireError
from ddpobs.wire.fields import UNKNOWN, Count, CountOrUnknown, Index, Name, Nanoseconds, Rank, Record, Scalar, Size
from ddpobs.wire.pulse import Activity
from ddpobs.wire.schema import Event
from ddpobs.wire.text import NONCE

_Status = Annotated[int, msgspec.Meta(ge=-(2**32), le=2**32)]


class EndFacts(Record, frozen=True, kw_only=True):
    """How and where a process ended: `failed`, `terminated`, `interrupted`, `died`, `resumed`.

    Attributes:
        wall_ns: Time on the rank's wall clock; 0 if it is not known.
        phase: Phase of the training thread; empty if it is not known.
        module: Number of the module of `bucket`.
        bucket: Index of the bucket that was launched last.
        step: Number of the open step.
        synchronised: Number of synchronised backward passes that the rank had begun.
        error: Class of the error; empty without one.
        message: Its message.
        traceback: Last lines of its traceback.
        place: Innermost lines of the user's code in it, such as `train.py:57 → dataset.py:31 __getitem__`.
        stage: `start` or `init_process_group` where the rank had no telemetry yet; `command` for the command under
            `ddpobs run`, which ended before any rank had it; else empty.
        output: Last lines that the command wrote to stderr; empty if they are not known.
        signal: Signal that ended the process; empty without one.
        exit_status: Exit status of the process; None if it is not known.
        oom_kills: Number of processes that the kernel killed on that host for want of memory.
        rank: Rank that died, where another one reports it.
        source: Source that died, where another one reports it.
    """

    wall_ns: Nanoseconds = 0
    phase: Name = ""
    module: Index = UNKNOWN
    bucket: Index = UNKNOWN
    step: CountOrUnknown = UNKNOWN
    synchronised: CountOrUnknown = UNKNOWN
    error: str = ""
    message: str = ""
    traceback: str = ""
    place: Name = ""
    stage: Name = ""
    output: str = ""
    signal: Name = ""
    exit_status: _Status | None = None
    oom_kills: Count = 0
    rank: Rank | None = None
    source: Annotated[str, msgspec.Meta(pattern=rf"^({NONCE})?\Z")] = ""


class StuckFacts(Record, frozen=True, kw_only=True):
    """A time without progress that is over: `stuck`.

    Attributes:
        idle_ns: Its length.
        outcome: `went on` or `ended`; empty from older clients.
        activity: What the rank did.
        waits_in: Name of the collective, where the activity is `collective`.
        place: Innermost lines of the user's code.
        synchronised: Number of synchronised backward passes that the rank had begun.
        patience_ns: Time without progress after which the rank counted as stuck; None from older clients.
        wall_ns: End on the rank's wall clock; None from older clients.
    """

    idle_ns: Count = 0
    outcome: Name = ""
    activity: Activity = ""
    waits_in: Name = ""
    place: Name = ""
    synchronised: CountOrUnknown = UNKNOWN
    patience_ns: Count | None = None
    wall_ns: Nanoseconds | None = None


class NotReducedFacts(Record, frozen=True, kw_only=True):
    """Steps of an optimizer on gradients that DDP did not reduce: `not_reduced`, `never_synchronised`, `exchanged`.

    Attributes:
        reason: `unsynchronised`, `bypassed` or `unfrozen`.
        parameters: Names of the first parameters, separated by commas.
        count: Number of parameters.
        module: Number of the DDP module in its process.
        optimizer_steps: Number of the optimizer's steps.
        exchanges: Number of times that the script's own collectives moved as much as the module has.
        exact: Number of these that are all-reduces over all ranks of just as many elements.
        every: Steps of the optimizer from one of these to the next.
    """

    reason: Name = ""
    parameters: str = ""
    count: Count = 0
    module: Index = UNKNOWN
    optimizer_steps: Count = 0
    exchanges: Count = 0
    exact: Count = 0
    every: Count = 0


class PipelineFacts(Record, frozen=True, kw_only=True):
    """A schedule: `pipeline`.

    Attributes:
        schedule: Its class.
        stages: Number of stages of the whole pipeline.
        held: Indices of the stages on this rank, separated by commas.
        micro_batches: Number of micro-batches of a step.
        first_rank: Lowest rank of the pipeline.
    """

    schedule: Name = ""
    stages: Rank = 0
    held: Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,7}(,[0-9]{1,7})*)?\Z", max_length=1024)] = ""
    micro_batches: Rank = 0
    first_rank: Index = UNKNOWN

    @property
    def held_stages(self) -> tuple[int, ...]:
        """Indices of the stages on this rank."""
        return tuple(int(index) for index in self.held.split(",") if index)


class SamplerFacts(Record, frozen=True, kw_only=True):
    """A sampler that repeated an order: `sampler_without_set_epoch`.

    Attributes:
        sampler: Its class.
        dataset: Class of its dataset.
        epoch: Epoch at which it stays.
    """

    sampler: Name = "unknown"
    dataset: Name = "unknown"
    epoch: Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)] = 0


class ModuleFacts(Record, frozen=True, kw_only=True):
    """A change of a module: `buckets_rebuilt`, `comm_hook_set`, `comm_hook_unseen`.

    Attributes:
        module: Number of the DDP module in its process.
        buckets: Number of its buckets.
        name: Name of the hook.
        reason: Reason why the hook is not observed.
    """

    module: Index = UNKNOWN
    buckets: CountOrUnknown = UNKNOWN
    name: Name = ""
    reason: Name = ""


class DumpFacts(Record, frozen=True, kw_only=True):
    """What imported dumps of the collectives under way show of a hang: `collectives_dumped`.

    Attributes:
        kind: `absent`, `mismatch`, `entered` or `unknown`.
        verdict: In which collective the ranks wait, and for whom.
        cause: What each rank did last.
        ranks: Ranks that the others wait for, separated by commas.
        waiting: Ranks that wait, separated by commas.
    """

    kind: Name = ""
    verdict: Name = ""
    cause: Name = ""
    ranks: Name = ""
    waiting: Name = ""


class SettingFacts(Record, frozen=True, kw_only=True):
    """Settings of a hello that the collector computes with.

    Attributes:
        group_ranks: Number of ranks of the module's process group; None if it is not known.
        group_first: Lowest of these ranks, if they are a part of the world.
        not_compared: Why the ranks of imported files are not compared; empty if they are.
        threads: Number of threads of torch; 0 if it is not known.
        processors: Processors that the process may use, as ranges: `0-3,8`.
        bucket_cap_mb: Limit of a bucket's size, in MiB; None if it is not known.
        tags: Tags of the run, separated by commas.
        note: Note about the run.
        wrapped_at: Place in the code that wrapped the first module: `train.py:31 main`; empty if it is not known.
        reducer: `ddpobs`, or `torch`.
        compiled_buckets: Torch's compiler merges the all-reduces, in place of the reducer's buckets.
    """

    group_ranks: Size | None = None
    group_first: Rank | None = None
    not_compared: str = ""
    threads: Rank = 0
    processors: str = ""
    bucket_cap_mb: Annotated[float, msgspec.Meta(ge=0, le=2**63)] | None = None
    tags: str = ""
    note: str = ""
    wrapped_at: str = ""
    reducer: str = ""
    compiled_buckets: bool = False


DUMPED = "collectives_dumped"
FORMS: dict[str, type[Record]] = {
    **dict.fromkeys(("failed", "terminated", "interrupted", "died", "resumed"), EndFacts),
    "stuck": StuckFacts,
    **dict.fromkeys(("not_reduced", "never_synchronised", "exchanged"), NotReducedFacts),
    "pipeline": PipelineFacts,
    DUMPED: DumpFacts,
    "sampler_without_set_epoch": SamplerFacts,
    **dict.fromkeys(("buckets_rebuilt", "comm_hook_set", "comm_hook_unseen"), ModuleFacts),
}
"""The form of each kind of event. Other kinds have no facts that anything computes with."""
Form = TypeVar("Form", bound=Record)


def facts_of(event: Event, form: type[Form]) -> Form:
    """Return the facts of an event; absent and wrong ones have the form's defaults."""
    return read_facts(event.detail, form)


def read_facts(detail: Mapping[str, Scalar], form: type[Form]) -> Form:
    """Return facts in a form; absent and wrong ones have its defaults."""
    given = _given(detail)
    try:
        return msgspec.convert(given, form)
    except msgspec.ValidationError:
        return form(**dict(_valid(given, form)))


def check_event(field: str, event: Event) -> None:
    """Refuse facts of another type than the form's.

    Raises:
        WireError: Names the fact.
    """
    if (form := FORMS.get(event.kind)) is not None:
        check_facts(f"{field}.detail", event.detail, form)


def check_facts(field: str, given: Mapping[str, Scalar], form: type[Record]) -> None:
    """Refuse facts of another type than the form's.

    Raises:
        WireError: Names the fact.
    """
    try:
        msgspec.convert(_given(given), form)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise WireError(f"{field}.{path.rstrip('`')}", "the wire schema", reason) from None


def _given(detail: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value for name, value in detail.items() if value is not None}


def _valid(given: Mapping[str, Scalar], form: type[Record]) -> list[tuple[str, Scalar]]:
    valid = []
    for field in msgspec.structs.fields(form):
        if field.name in given:
            try:
                valid.append((field.name, msgspec.convert(given[field.name], field.type)))
            except msgspec.ValidationError:
                continue
    return valid
