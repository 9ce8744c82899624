"""The route of an attempt's ranks: their processes, mean times and last pulses."""

from __future__ import annotations

import time
from typing import Annotated, Any, cast

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from ddpobs import wire
from ddpobs.wire.facts import SettingFacts, read_facts
from ddpobs.wire.states import RankState
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import AttemptDep, RunDep, SettingsDep, StoreDep
from ddpobs_server.api.fields import (
    AttemptResponse,
    Dropped,
    Emitted,
    LastSeenNs,
    PhaseTimes,
    RankId,
    StepCount,
    StepNumber,
    doc,
)
from ddpobs_server.api.responses import json_response
from ddpobs_server.reports.run_state import state_of_rank
from ddpobs_server.settings import Settings
from ddpobs_server.store import Rollup, Source

router = APIRouter(prefix="/api/v1", tags=["runs"], route_class=ConcurrencyLimitedRoute)


class Machine(TypedDict):
    """State of a rank's host and device at its last pulse; null where the system does not report it.

    Shares are parts of a thousand since the pulse before.
    """

    processors: Annotated[int | None, doc("Number of processors that the process may use; null if not reported.")]
    process_permille: Annotated[
        int | None, doc("Processor time of the process, in parts of a thousand of one processor; null if not reported.")
    ]
    busy_permille: Annotated[
        int | None, doc("Host's processor time in use, in parts of a thousand; null if not reported.")
    ]
    steal_permille: Annotated[
        int | None,
        doc("Host's processor time that its hypervisor gave to others, in parts of a thousand; null if not reported."),
    ]
    load_milli: Annotated[
        int | None, doc("Thousand times the host's load average over one minute; null if not reported.")
    ]
    quota_permille: Annotated[
        int | None, doc("Quota of the control group, in parts of a thousand of one processor; null if not reported.")
    ]
    throttled_ns: Annotated[
        int | None,
        doc("Time that the quota held the process up since its start, in nanoseconds; null if not reported."),
    ]
    memory_bytes: Annotated[int | None, doc("Memory of the host, in bytes; null if not reported.")]
    available_bytes: Annotated[
        int | None, doc("Memory of the host that programs can still take, in bytes; null if not reported.")
    ]
    resident_bytes: Annotated[int | None, doc("Memory of the process, in bytes; null if not reported.")]
    device_busy_permille: Annotated[
        int | None, doc("Device's time in which a kernel ran, in parts of a thousand; null if not reported.")
    ]
    device_clock_mhz: Annotated[int | None, doc("Clock of the device's processors, in MHz; null if not reported.")]
    device_most_clock_mhz: Annotated[
        int | None, doc("Highest clock of the device's processors, in MHz; null if not reported.")
    ]
    device_memory_bytes: Annotated[int | None, doc("Memory of the device, in bytes; null if not reported.")]
    device_used_bytes: Annotated[
        int | None, doc("Memory of the device that is in use, in bytes; null if not reported.")
    ]
    device_slowdowns: Annotated[list[str], doc("Reasons for which the device lowers its clock.")]


class Pulse(TypedDict):
    """Last recorded activity of a process; `module` and `bucket` are null if it was in none.

    `idle_ns` is the time without progress, `patience_ns` the time after which the rank counts as stuck; `place` and
    `stack` are lines of Python.
    """

    at_ns: Annotated[int, doc("Time of the pulse on the rank's monotonic clock, in nanoseconds.")]
    phase: Annotated[str, doc("Phase of the step.")]
    step: StepNumber
    module: Annotated[int | None, doc("Number of the DDP module in its process; null before the first bucket.")]
    bucket: Annotated[int | None, doc("Index of the bucket in its layout; null before the first bucket.")]
    idle_ns: Annotated[int, doc("Time without progress, in nanoseconds.")]
    patience_ns: Annotated[int, doc("Time without progress after which the rank counts as stuck, in nanoseconds.")]
    activity: Annotated[str, doc("Last recorded activity, such as `bucket` or `data`.")]
    waits_in: Annotated[str, doc("Function in which the rank waits; empty if unknown.")]
    place: Annotated[str, doc("Line of Python that the rank is at; empty if unknown.")]
    stack: Annotated[list[str], doc("Lines of Python, the innermost last; empty unless the rank is stuck.")]
    threads: Annotated[
        dict[str, list[str]],
        doc("The same of other threads in the user's code, by name; empty unless the rank is stuck."),
    ]
    machine: Annotated[Machine | None, doc("State of the host and the device; null if the pulse has none.")]


class SourceFields(TypedDict):
    """Fields of a rank that are copied from `store.Source`."""

    rank: RankId
    source: Annotated[str, doc("Id of the process: 16 hexadecimal digits.")]
    last_step: Annotated[int, doc("Number of the rank's last step.")]
    last_seen_ns: LastSeenNs
    emitted: Emitted
    dropped: Dropped
    goodbye: Annotated[bool, doc("Whether the process said that it ends.")]
    ended: Annotated[str, doc("How the process ended; empty while it runs.")]
    stuck_ns: Annotated[
        int, doc("Time without progress at the last pulse, 0 if the rank is not stuck, in nanoseconds.")
    ]


class ProcessFields(TypedDict):
    """Fields of a rank that are copied from its hello; null until the hello arrives."""

    host: Annotated[str | None, doc("Name of the host; null until it is known.")]
    device: Annotated[str | None, doc("Device of the rank's model; null until it is known.")]
    backend: Annotated[str | None, doc("Backend of the process group; null until it is known.")]
    pid: Annotated[int | None, doc("Number of the process on its host; null until it is known.")]


class RankFields(TypedDict):
    """Fields of a rank that are computed; times are means per step, null until they are known."""

    state: Annotated[RankState, doc("State.")]
    steps: StepCount
    clock_ahead_ns: Annotated[
        int, doc("Time by which the rank's wall clock is ahead of the collector's, in nanoseconds.")
    ]
    phases_ns: Annotated[PhaseTimes | None, doc("Mean time of a step by phase, in nanoseconds; null without steps.")]
    own_ns: Annotated[
        int | None, doc("Time of a step without waits for other ranks, in nanoseconds; null until it is known.")
    ]
    group_ranks: Annotated[int | None, doc("Number of ranks that reduce gradients together; null until it is known.")]
    group_first: Annotated[
        int | None, doc("Lowest of these ranks, if they are a part of the world and known; else null.")
    ]
    pulse: Annotated[Pulse | None, doc("Last pulse (heartbeat); null before the first.")]
    stuck_pulse: Annotated[
        Pulse | None,
        doc("Last pulse in which the rank was stuck, without figures of the machine; null if it never was."),
    ]


class Rank(SourceFields, ProcessFields, RankFields):
    """A rank's process. Times are means per step; values that are not known yet are null."""


class Ranks(AttemptResponse):
    """The attempt's ranks."""

    ranks: Annotated[list[Rank], doc("The ranks.")]


_SOURCE_FIELDS = tuple(SourceFields.__annotations__)
_HELLO_FIELDS = tuple(ProcessFields.__annotations__)
_PULSE_FIELDS, _MACHINE_FIELDS = tuple(Pulse.__annotations__), tuple(Machine.__annotations__)


@router.get("/runs/{run}/ranks", response_model=Ranks)
def get_ranks(run: RunDep, attempt: AttemptDep, store: StoreDep, settings: SettingsDep) -> Response:
    """Each rank's process, state, counts, mean phases and last pulse."""
    rollups = {rollup.rank: rollup for rollup in store.rollups(run.run, attempt)}
    sources = store.sources(run.run, attempt)
    ranks = (_rank_json(source, rollups.get(source.rank), settings) for source in sources)
    return json_response({"run": run.name, "attempt": attempt, "ranks": ranks})


def _rank_json(source: Source, rollup: Rollup | None, settings: Settings) -> Rank:
    own_settings = read_facts(source.hello.settings if source.hello else {}, SettingFacts)
    computed: RankFields = {
        "state": state_of_rank(source, settings, time.time_ns()),
        "steps": rollup.steps if rollup else 0,
        "clock_ahead_ns": source.anchor.wall_ns - source.last_seen_ns,
        "phases_ns": {phase: total // rollup.steps for phase, total in rollup.phases_ns.items()} if rollup else None,
        "own_ns": rollup.own_ns // rollup.own_steps if rollup and rollup.own_steps else None,
        "group_ranks": own_settings.group_ranks,
        "group_first": own_settings.group_first,
        "pulse": _pulse_json(source.pulse),
        "stuck_pulse": _pulse_json(source.stuck_pulse),
    }
    stored = {name: getattr(source, name) for name in _SOURCE_FIELDS}
    process = {name: getattr(source.hello, name, None) for name in _HELLO_FIELDS}
    return cast(Rank, stored | process | computed)


def _pulse_json(record: wire.Pulse | None) -> Any:
    """Return a pulse with null for each number that is unknown on the wire."""
    if record is None:
        return None
    pulse = {name: getattr(record, name) for name in _PULSE_FIELDS}
    pulse |= {name: None if pulse[name] == wire.UNKNOWN else pulse[name] for name in ("module", "bucket")}
    if record.machine is not None:
        values = {name: getattr(record.machine, name) for name in _MACHINE_FIELDS}
        pulse["machine"] = {name: None if value == wire.UNKNOWN else value for name, value in values.items()}
    return pulse
