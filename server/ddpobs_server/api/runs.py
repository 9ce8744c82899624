"""Routes of runs: the list, one run, its attempts, and its deletion."""

from __future__ import annotations

import base64
import re
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from typing_extensions import TypedDict

from ddpobs.shared.words import STATED_ELSEWHERE
from ddpobs.wire.states import RunState
from ddpobs_server.analysis.finding import Severity
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import Admin, Reader, ReportsDep, RunDep, SettingsDep, StoreDep
from ddpobs_server.api.fields import (
    AttemptResponse,
    Dropped,
    Emitted,
    Facts,
    Goodput,
    HostName,
    LastSeenNs,
    RunName,
    StepCount,
    VerdictKind,
    VerdictText,
    WorldSize,
    doc,
)
from ddpobs_server.api.findings import Gain
from ddpobs_server.api.labels import Labels
from ddpobs_server.api.layout import Module
from ddpobs_server.reports.attempts import AttemptOutcome
from ddpobs_server.reports.digests import RunDigest
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.run_state import state_of_run
from ddpobs_server.reports.run_times import Span
from ddpobs_server.settings import Settings
from ddpobs_server.store import Attempt, Run, WantedRuns, labels_of, trained_labels
from ddpobs_server.web.audit_entry import entry_of
from ddpobs_server.web.problems import Problem

router = APIRouter(prefix="/api/v1", tags=["runs"], route_class=ConcurrencyLimitedRoute)

SEARCH_CHARACTERS = 256
"""Maximum number of characters of a search."""
_OPEN: tuple[RunState, ...] = ("running", "stalled", "hung")
"""States in which a run has no end yet."""
_CURSOR = re.compile(r"([1-8]?\d{1,18})/([A-Za-z0-9._/-]{1,128})", re.ASCII)


class RunSummary(AttemptResponse):
    """A run, with the sums over its latest attempt."""

    state: Annotated[RunState, doc("State.")]
    created_ns: Annotated[int, doc("Arrival of the run's first batch, as Unix time, in nanoseconds.")]
    last_seen_ns: LastSeenNs
    world_size: WorldSize
    ranks: Annotated[int, doc("Number of ranks that have reported.")]
    steps: StepCount
    emitted: Emitted
    dropped: Dropped


class LastDiagnosis(TypedDict):
    """The worst finding, and counts; `current` is true if it is up to date."""

    verdict: VerdictKind
    summary: VerdictText
    worst: Annotated[str | None, doc("Title of the worst finding; null without one.")]
    severity: Annotated[Severity | None, doc("How severe the finding is; null without a finding.")]
    code: Annotated[str | None, doc("Code of the finding; null without a finding.")]
    gain: Annotated[Gain | None, doc("Predicted saving if the remedy works; null if it is not known.")]
    goodput: Goodput
    findings: Annotated[int, doc("Number of findings.")]
    missing: Annotated[int, doc("Number of findings that could not be judged.")]
    current: Annotated[bool, doc("Whether the diagnosis is up to date.")]


class ListedRun(RunSummary, Labels):
    """A run in a list; `diagnosis` is null until the run's diagnostics are first requested.

    Its times are those of its ranks' clocks, so that a run that waited in a spool has its own begin, end and duration.
    `step_times_ns` are means of at most 32 parts of the run.
    """

    diagnosis: Annotated[LastDiagnosis | None, doc("The last diagnosis; null before the first.")]
    began_ns: Annotated[int | None, doc("Begin as Unix time, in nanoseconds; null if imported files lack it.")]
    ended_ns: Annotated[int | None, doc("End as Unix time, in nanoseconds; null while it runs, or if files lack it.")]
    duration_ns: Annotated[int, doc("Time from its begin to its last batch, in nanoseconds; of files that they cover.")]
    step_ns: Annotated[int | None, doc("Median of `step_times_ns`, in nanoseconds; null without steps.")]
    steps_per_s: Annotated[float | None, doc("Steps a second at the end of the run; null without steps.")]
    step_times_ns: Annotated[
        list[int], doc("Mean step time of at most 32 parts of the run, oldest first, in nanoseconds.")
    ]
    host: HostName


class RunPage(TypedDict):
    """`next` is the next page's cursor."""

    runs: Annotated[list[ListedRun], doc("The runs.")]
    matches: Annotated[int, doc("Number of runs on all pages that meet the conditions, without `state`.")]
    total: Annotated[int, doc("Number of runs of the workspace.")]
    next: Annotated[str | None, doc("Where the next page begins; null at the end.")]


class Hello(TypedDict):
    """Facts that a rank's process sent at its start."""

    host: HostName
    pid: Annotated[int, doc("Number of the process on its host.")]
    device: Annotated[str, doc("Device of the rank's model.")]
    backend: Annotated[str, doc("Backend of the process group.")]
    versions: Annotated[dict[str, str], doc("Versions by name of the program.")]
    settings: Annotated[Facts, doc("Settings by name.")]


class Attempts(TypedDict):
    """The run's attempts, oldest first."""

    run: RunName
    attempts: Annotated[list[AttemptOutcome], doc("The run's attempts, oldest first.")]


class RunDetails(RunSummary, Labels):
    """One run."""

    attempts: Annotated[list[Attempt], doc("The run's attempts, oldest first.")]
    hello: Annotated[
        Hello | None, doc("Facts that the lowest rank's process sent at its start; null until they arrive.")
    ]
    modules: Annotated[list[Module], doc("The DDP modules of the process.")]


@router.get("/runs")
def list_runs(
    caller: Reader,
    store: StoreDep,
    reports: ReportsDep,
    settings: SettingsDep,
    limit: Annotated[int, Query(ge=1, le=500, description="Most runs of a page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=512, description="`next` of the page before.")] = None,
    state: Annotated[RunState | None, Query(description="Only runs of this state, of this page.")] = None,
    search: Annotated[
        str, Query(max_length=SEARCH_CHARACTERS, description="Only runs whose name, host, note or #tag has each word.")
    ] = "",
    seen_after_ns: Annotated[
        int, Query(ge=0, le=2**62, description="Only runs with a batch after this Unix time, in ns.")
    ] = 0,
    created_after_ns: Annotated[
        int, Query(ge=0, le=2**62, description="Only runs whose first batch came after this Unix time, in ns.")
    ] = 0,
) -> RunPage:
    """Runs, newest first by their creation, so that no run moves between pages.

    `next` is the cursor of the next page; `state` filters within a page. `search` has words between spaces, and ignores
    the case of letters. With `seen_after_ns` a list that is known already is kept up to date.

    Duration, step times and rate of a live run may be those of five seconds ago.

    `diagnosis` is the result of the last request for diagnostics, with the verdict of the worst finding. `current` is
    true if no batch arrived since, and the run is over or lost, or the result is younger than two seconds.
    """
    wanted = WantedRuns(search, seen_after_ns, created_after_ns)
    page = store.runs(limit, _from_cursor(cursor), caller.workspace, wanted)
    matches, total = store.run_counts(caller.workspace, wanted)
    digests = reports.digests.of(page)
    runs = [_listed_run(run, digest, reports, settings) for run, digest in zip(page, digests, strict=True)]
    return {
        "runs": [run for run in runs if state in (None, run["state"])],
        "matches": matches,
        "total": total,
        "next": _to_cursor(page[-1]) if len(page) == limit else None,
    }


@router.get("/runs/{run}")
def get_run(run: RunDep, store: StoreDep, settings: SettingsDep) -> RunDetails:
    """One run, with its attempts, its modules and the hello of its lowest rank."""
    sources = store.sources(run.run, run.attempt)
    hello = next((source.hello for source in sources if source.hello), None)
    names = {outline.module: outline.name for outline in store.layout_outlines(run.run, run.attempt)}
    tags, note = labels_of(run, trained_labels(hello))
    return {
        **_run_json(run, settings),
        "tags": tags,
        "note": note,
        "attempts": store.attempts(run.run),
        "hello": msgspec.to_builtins(hello),
        "modules": [{"module": module, "name": name} for module, name in sorted(names.items())],
    }


@router.get("/runs/{run}/attempts")
def get_attempts(run: RunDep, reports: ReportsDep) -> Attempts:
    """Each attempt with its outcome, the reason, the first rank to fail and its times, oldest first."""
    return {"run": run.name, "attempts": reports.attempts(run)}


@router.delete("/runs/{run}", status_code=204)
def delete_run(request: Request, run: RunDep, admin: Admin, store: StoreDep) -> Response:
    """Delete all data of a run."""
    # Before the deletion, which takes many transactions: nothing disappears without an entry.
    store.add_audit_entry(entry_of(request, admin, "run.delete", run.name))
    store.delete(run.run)
    return Response(status_code=204)


def _run_json(run: Run, settings: Settings) -> RunSummary:
    return {
        "run": run.name,
        "state": state_of_run(run, settings, time.time_ns()),
        "attempt": run.attempt,
        "created_ns": run.created_ns,
        "last_seen_ns": run.last_seen_ns,
        "world_size": run.world_size,
        "ranks": run.ranks,
        "steps": run.steps,
        "emitted": run.emitted,
        "dropped": run.dropped,
    }


def _listed_run(run: Run, digest: RunDigest, reports: Reports, settings: Settings) -> ListedRun:
    tags, note = labels_of(run, (digest.tags, digest.note))
    summary = _run_json(run, settings)
    began_ns, ended_ns, duration_ns = _times(run, digest.span, summary["state"])
    return {
        **summary,
        "tags": tags,
        "note": note,
        "diagnosis": _diagnosis_json(reports, run),
        "began_ns": began_ns,
        "ended_ns": ended_ns,
        "duration_ns": duration_ns,
        "step_ns": digest.step_ns,
        "steps_per_s": digest.steps_per_s,
        "step_times_ns": list(digest.step_times_ns),
        "host": digest.host,
    }


def _times(run: Run, span: Span | None, state: RunState) -> tuple[int | None, int | None, int]:
    """Begin, end and duration of a run, as `AttemptOutcome` has the times of an attempt."""
    if span is None:
        span = Span(run.created_ns, run.last_seen_ns)
    began_ns, latest_ns, is_dated = span
    duration_ns = max(0, latest_ns - began_ns)
    if not is_dated or (run.imported and state == "hung"):
        return None, None, duration_ns
    is_open = state in _OPEN and not run.is_over
    return began_ns, None if is_open else latest_ns, duration_ns


def _diagnosis_json(reports: Reports, run: Run) -> LastDiagnosis | None:
    diagnosis, current = reports.last_diagnosis(run)
    if diagnosis is None:
        return None
    worst = next((finding for finding in diagnosis.findings if finding.code not in STATED_ELSEWHERE), None)
    return {
        "verdict": diagnosis.verdict,
        "summary": diagnosis.summary,
        "worst": diagnosis.worst,
        "severity": worst.severity if worst else None,
        "code": worst.code if worst else None,
        "gain": worst.gain if worst else None,
        "goodput": diagnosis.goodput,
        "findings": sum(count for (code, _), count in diagnosis.counts.items() if code not in STATED_ELSEWHERE),
        "missing": diagnosis.missing,
        "current": current,
    }


def _to_cursor(run: Run) -> str:
    return base64.urlsafe_b64encode(f"{run.created_ns}/{run.run}".encode()).decode()


def _from_cursor(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    try:
        match = _CURSOR.fullmatch(base64.urlsafe_b64decode(cursor.encode()).decode())
    except ValueError:
        match = None
    if match is None:
        raise Problem(422, "Bad cursor", "cursor: expected the value of `next`", field="cursor")
    return int(match[1]), match[2]
