"""Schemas of the responses. If a route encodes its JSON itself, its schema is only for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict  # Before Python 3.12 pydantic accepts only these.

from ddpobs.wire.states import RankState, RunState
from ddpobs_server.analysis.finding import Gain, Severity
from ddpobs_server.api.columns import SpanColumns, StepColumns
from ddpobs_server.reports.attempts import AttemptOutcome
from ddpobs_server.store import Attempt
from ddpobs_server.web.workspace_usage import Usage

_Facts = dict[str, str | int | float | bool | None]
_Phases = dict[str, int]
"""Nanoseconds by phase."""


class AttemptResponse(TypedDict):
    """Base of the responses about one attempt of a run."""

    run: str
    attempt: str


class RunSummary(AttemptResponse):
    """A run, with the sums over its latest attempt."""

    state: RunState
    created_ns: int
    last_seen_ns: int
    world_size: int
    ranks: int
    steps: int
    emitted: int
    dropped: int


class LastDiagnosis(TypedDict):
    """The worst finding, and counts; `current` is true if it is up to date."""

    worst: str | None
    severity: Severity | None
    code: str | None
    gain: Gain | None
    goodput: float | None
    findings: int
    missing: int
    current: bool


class Labels(TypedDict):
    """Tags and a note: those that a person set, else those of the training."""

    tags: list[str]
    note: str


class LabelsResponse(Labels):
    """The labels of a run after a change."""

    run: str


class ListedRun(RunSummary, Labels):
    """A run in a list; `diagnosis` is null until the run's diagnostics are first requested.

    `duration_ns` lasts from the first to the last batch. `step_times_ns` are means of at most 32 parts of the run.
    """

    diagnosis: LastDiagnosis | None
    duration_ns: int
    step_ns: int | None
    steps_per_s: float | None
    step_times_ns: list[int]
    host: str


class RunPage(TypedDict):
    """`next` is the next page's cursor."""

    runs: list[ListedRun]
    next: str | None


class Hello(TypedDict):
    """Facts that a rank's process sent at its start."""

    host: str
    pid: int
    device: str
    backend: str
    versions: dict[str, str]
    settings: _Facts


class Module(TypedDict):
    """A DDP module of the process."""

    module: int
    name: str


class Attempts(TypedDict):
    """The run's attempts, oldest first."""

    run: str
    attempts: list[AttemptOutcome]


class RunDetails(RunSummary, Labels):
    """One run."""

    attempts: list[Attempt]
    hello: Hello | None
    modules: list[Module]


class Machine(TypedDict):
    """State of a rank's host and device at its last pulse; null where the system does not report it.

    Shares are parts of a thousand since the pulse before.
    """

    processors: int | None
    process_permille: int | None
    busy_permille: int | None
    steal_permille: int | None
    load_milli: int | None
    quota_permille: int | None
    throttled_ns: int | None
    memory_bytes: int | None
    available_bytes: int | None
    resident_bytes: int | None
    device_busy_permille: int | None
    device_clock_mhz: int | None
    device_most_clock_mhz: int | None
    device_memory_bytes: int | None
    device_used_bytes: int | None
    device_slowdowns: list[str]


class Pulse(TypedDict):
    """Last recorded activity of a process; `module` and `bucket` are null if it was in none.

    `idle_ns` is the time without progress, `patience_ns` the time after which the rank counts as stuck; `place` and
    `stack` are lines of Python.
    """

    at_ns: int
    phase: str
    step: int
    module: int | None
    bucket: int | None
    idle_ns: int
    patience_ns: int
    activity: str
    waits_in: str
    place: str
    stack: list[str]
    machine: Machine | None


class SourceFields(TypedDict):
    """Fields of a rank that are copied from `store.Source`."""

    rank: int
    source: str
    last_step: int
    last_seen_ns: int
    emitted: int
    dropped: int
    goodbye: bool
    ended: str
    stuck_ns: int


class ProcessFields(TypedDict):
    """Fields of a rank that are copied from its hello; null until the hello arrives."""

    host: str | None
    device: str | None
    backend: str | None
    pid: int | None


class RankFields(TypedDict):
    """Fields of a rank that are computed; times are means per step, null until they are known."""

    state: RankState
    steps: int
    clock_ahead_ns: int
    phases_ns: _Phases | None
    own_ns: int | None
    pulse: Pulse | None


class Rank(SourceFields, ProcessFields, RankFields):
    """A rank's process. Times are means per step; values that are not known yet are null."""


class Ranks(AttemptResponse):
    """The attempt's ranks."""

    ranks: list[Rank]


class Parameter(TypedDict):
    """A parameter; `size` counts elements."""

    name: str
    size: int


class LaidOutBucket(TypedDict):
    """A bucket's parameters."""

    bucket: int
    size_bytes: int
    dtype: str
    parameters: list[Parameter]


class Layout(Module):
    """The buckets of a module, in launch order."""

    revision: int
    comm: str
    buckets: list[LaidOutBucket]


class Layouts(AttemptResponse):
    """By module and revision; `left_out` counts the layouts that did not fit."""

    layouts: list[Layout]
    left_out: int


class StepPage(AttemptResponse):
    """Columns of one length; `next` is the next page's first step."""

    columns: StepColumns
    next: int | None


class SpanPage(AttemptResponse):
    """Columns of one length; `next` is the next page's first step."""

    columns: SpanColumns
    next: int | None


class Bucket(TypedDict):
    """Mean times of a bucket; size, type and number of parameters are null without its layout."""

    module: int
    revision: int
    bucket: int
    size_bytes: int | None
    dtype: str | None
    parameters: int | None
    steps: int
    compute_ns: int
    comm_ns: int
    exposed_ns: int


class Buckets(AttemptResponse):
    """By module, revision and index; `complete` is false if there are more."""

    buckets: list[Bucket]
    complete: bool


class UnusedSet(TypedDict):
    """Parameters without a gradient, by name, on the rank and on all ranks."""

    rank: int
    step: int
    module: int
    locally: list[str]
    globally: list[str]


class UnusedSets(AttemptResponse):
    """Each time a set changed; `left_out` counts the sets that did not fit."""

    unused: list[UnusedSet]
    left_out: int


class Lateness(TypedDict):
    """Shares of steps in which a rank was last or late; its mean delay, median own time, and excess by phase."""

    rank: int
    last_share: float
    late_share: float
    delay_ns: int
    own_ns: int
    excess_ns: _Phases


class Stragglers(AttemptResponse):
    """By step, and by step and rank."""

    steps: list[int]
    ranks: list[int]
    own_ns: list[list[int]]
    excess_ns: list[list[int]]
    delay_ns: list[int]
    last_rank: list[int]
    noise_ns: int
    per_rank: list[Lateness]
    next: int | None


class PipelineStage(TypedDict):
    """Ranks that hold the same stages. Times of a step are medians over the steps, and means over the replicas."""

    stages: list[int]
    ranks: list[int]
    steps: int
    step_ns: int
    schedule_ns: int
    computing_ns: int
    receive_wait_ns: int
    send_wait_ns: int
    bubble: float
    reduce_ns: int | None
    reduce_wait_ns: int | None
    reduce_exposed_ns: int | None
    reduce_overlap: float | None


class Pipeline(TypedDict):
    """A schedule and its stages."""

    schedule: str
    stages: int
    micro_batches: int
    expected_bubble: float | None
    predicted_ns: int
    by_rank: list[PipelineStage]


class PipelineResponse(AttemptResponse):
    """The pipeline of an attempt; null without one."""

    pipeline: Pipeline | None
    missing: list[str]


class Interval(TypedDict("Bounds", {"from": int, "to": int})):
    """Steps, and when they began and ended: Unix time, null if unknown."""

    began_ns: int | None
    ended_ns: int | None


class StepLevel(Interval):
    """Steps with about the same step time."""

    step_ns: int


class FindingResponse(TypedDict):
    """One problem of the run. `steps` are those of the evidence; in `intervals` the problem held.

    Show its parts in this order: verdict, measure, when, cause, where, remedy, gain. Empty parts do not apply.
    """

    code: str
    severity: Severity
    title: str
    verdict: str
    measure: str
    when: str
    cause: str
    where: str
    remedy: str
    steps: list[int]
    intervals: list[Interval]
    ranks: list[int]
    buckets: list[int]
    parameters: list[str]
    phase: str | None
    evidence: dict[str, Any]
    gain: Gain | None


class AccountPart(TypedDict):
    """A part of the wall time; `share` is of the run's, or of the attempt's, rank time."""

    part: str
    group: Literal["steps", "outside", "start_up", "restarts", "idle", "not_known"]
    title: str
    rank_ns: int
    share: float
    hours: float
    cost: float | None
    is_goodput: bool


class AccountRank(TypedDict):
    """Time of a rank by part; null with the reason if it is not known."""

    rank: int
    parts_ns: dict[str, int] | None
    reason: str | None


class AccountTotal(TypedDict):
    """Parts add up to `rank_ns`, the wall time summed over the ranks. Times and costs are null if they are not known.

    `goodput` is the time in steps that no restart repeated, over the known wall time.
    """

    began_ns: int | None
    until_ns: int | None
    wall_ns: int | None
    rank_ns: int
    goodput: float | None
    lost_hours: float
    lost_cost: float | None
    parts: list[AccountPart]


class AttemptAccount(AccountTotal):
    """Account of an attempt; `ranks` is empty except for the requested attempt."""

    attempt: str
    ordinal: int
    steps: int
    repeated_steps: int
    ranks: list[AccountRank]


class Account(AccountTotal):
    """Account of a run. Hours are GPU hours, or hours of ranks without a GPU: `unit`."""

    run: str
    attempt: str
    unit: Literal["gpu-hour", "rank-hour"]
    price_per_hour: float | None
    attempts_left_out: int
    attempts: list[AttemptAccount]
    missing: list[str]


class Diagnostics(AttemptResponse):
    """Findings, the most severe first; `missing` lists the findings that could not be judged, and why.

    `step_levels` divides the run where the step time of all ranks shifts. `goodput` and `time_shares` are shares of the
    run's wall time, as in its account; null and empty if a part of the run is judged.
    """

    steps_seen: int
    findings: list[FindingResponse]
    missing: list[str]
    step_levels: list[StepLevel]
    goodput: float | None
    time_shares: dict[str, float]


class FigureKind(TypedDict):
    """A figure that a run has, and the query parameters that select what it shows."""

    figure: str
    title: str
    selection: list[str]


class Figures(TypedDict):
    """All figures, in the order of the page."""

    figures: list[FigureKind]


class FigureTable(TypedDict):
    """The content of a figure as text, at most 100 rows."""

    columns: list[str]
    rows: list[list[str | int]]


class Figure(AttemptResponse):
    """A figure. `item` is a BokehJS item, null if there is nothing to draw; `summary` says what it shows, or why not.

    `shown` has the steps, the ranks and the step that are drawn.
    """

    figure: str
    title: str
    summary: str
    item: dict[str, Any] | None
    height: int
    table: FigureTable
    shown: dict[str, Any]


class WorkspaceLimits(TypedDict):
    """Limits of a workspace; null is no limit."""

    share: float
    max_runs: int
    max_series: int
    batches_per_s: float | None
    mb_per_s: float | None
    reads_per_s: float | None
    keep_gb: float | None
    keep_runs_days: float | None


class Workspace(TypedDict):
    """A workspace."""

    workspace: str
    limits: WorkspaceLimits
    usage: Usage


class Workspaces(TypedDict):
    """By name."""

    workspaces: list[Workspace]


class Trace(TypedDict):
    """Chrome's trace event format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: Literal["ms", "ns"]
    otherData: dict[str, str]
