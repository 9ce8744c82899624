"""What the routes answer. Where a route makes its JSON itself, these are for the OpenAPI document alone."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic's own are these before Python 3.12

from ddpobs_server.analysis.finding import Finding
from ddpobs_server.reports.run_state import RankState, RunState
from ddpobs_server.store import Attempt

_Facts = dict[str, str | int | float | bool | None]
_Phases = dict[str, int]
"""Nanoseconds by phase."""


class OfAttempt(TypedDict):
    """What is of one attempt of a run."""

    run: str
    attempt: str


class RunSummary(OfAttempt):
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
    """`worst` is the worst finding's title, the others are counts; `current`: nothing came since."""

    worst: str | None
    findings: int
    missing: int
    current: bool


class ListedRun(RunSummary):
    """A run in a list; without a diagnosis where nobody asked yet."""

    diagnosis: LastDiagnosis | None


class RunPage(TypedDict):
    """`next` is the next page's cursor."""

    runs: list[ListedRun]
    next: str | None


class Hello(TypedDict):
    """What a rank's process said of itself."""

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


class RunDetails(RunSummary):
    """One run."""

    attempts: list[Attempt]
    hello: Hello | None
    modules: list[Module]


class Pulse(TypedDict):
    """What a process was doing when its telemetry last looked; -1 where it was at no module or bucket."""

    at_ns: int
    phase: str
    step: int
    module: int
    bucket: int


class Rank(TypedDict):
    """A rank's process; times are means of a step. Those that are None are not known yet."""

    rank: int
    state: RankState
    source: str
    host: str | None
    device: str | None
    backend: str | None
    pid: int | None
    steps: int
    last_step: int
    last_seen_ns: int
    clock_ahead_ns: int
    emitted: int
    dropped: int
    phases_ns: _Phases | None
    own_ns: int | None
    pulse: Pulse | None
    goodbye: bool


class Ranks(OfAttempt):
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


class Layouts(OfAttempt):
    """By module and revision."""

    layouts: list[Layout]


class Columns(OfAttempt):
    """Columns of one length, by name; `next` is the next page's first step."""

    columns: dict[str, list[int]]
    next: int | None


class Bucket(TypedDict):
    """Mean times of a bucket; its size, type and number of parameters are None where no layout tells."""

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


class Buckets(OfAttempt):
    """By module, revision and index."""

    buckets: list[Bucket]


class UnusedSet(TypedDict):
    """Parameters without a gradient, by name, on the rank and on all ranks."""

    rank: int
    step: int
    module: int
    locally: list[str]
    globally: list[str]


class UnusedSets(OfAttempt):
    """Each time a set changed."""

    unused: list[UnusedSet]


class Lateness(TypedDict):
    """How often a rank was last, and late; its mean delay, median own time, and excess by phase."""

    rank: int
    last_share: float
    late_share: float
    delay_ns: int
    own_ns: int
    excess_ns: _Phases


class Stragglers(OfAttempt):
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


class Diagnostics(OfAttempt):
    """Findings, the most severe first; `missing` says what could not be judged, and why."""

    steps_seen: int
    findings: list[Finding]
    missing: list[str]


class Trace(TypedDict):
    """Chrome's trace event format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: Literal["ms", "ns"]
    otherData: dict[str, str]
