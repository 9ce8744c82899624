"""The route of the fleet: all runs of a workspace over weeks."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from typing_extensions import TypedDict

from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import Reader, ReportsDep
from ddpobs_server.api.fields import Goodput, HostName, Name, Title, doc
from ddpobs_server.api.responses import json_response

router = APIRouter(prefix="/api/v1", tags=["fleet"], route_class=ConcurrencyLimitedRoute)

Sentence = Annotated[str, doc("The same in words.")]
Chance = Annotated[float, doc("Maximum probability of such a result by chance.")]


class LostPart(TypedDict):
    """Lost time of one cause."""

    part: Annotated[str, doc("Name of the part of the account.")]
    title: Title
    hours: Annotated[float, doc("Hours of all ranks.")]
    share: Annotated[float, doc("Share of the hours of all ranks.")]


class FleetSum(TypedDict):
    """Sums over runs. An attempt's time is spread evenly over the weeks in which it ran."""

    runs: Annotated[int, doc("Number of runs.")]
    rank_hours: Annotated[float, doc("Hours of all ranks, in wall time.")]
    lost_hours: Annotated[float, doc("Hours of all ranks in the parts that are lost.")]
    goodput: Goodput
    causes: Annotated[list[LostPart], doc("Lost parts, the largest first.")]


class FleetWeek(FleetSum):
    """Sums of one week."""

    began_ns: Annotated[int, doc("Monday, 0:00 UTC, as Unix time, in nanoseconds.")]


class FleetGroup(FleetSum):
    """Sums of the runs on one host, with one tag, or with one version of torch."""

    name: Name


class SlowHostRow(TypedDict):
    """A host that is the slowest of its jobs more often than chance explains."""

    host: HostName
    jobs: Annotated[int, doc("Jobs on the host in which some host was late by 2 % of a step.")]
    slow_jobs: Annotated[int, doc("Jobs in which this host was the slowest.")]
    expected_jobs: Annotated[float, doc("The same by chance.")]
    rank_zero_jobs: Annotated[int, doc("Slow jobs in which it held rank 0.")]
    excess_ratio: Annotated[float, doc("Median lateness in the slow jobs, as a share of a step.")]
    chance: Chance
    text: Sentence


class RegressionRow(TypedDict):
    """A group of runs that loses more than in the four weeks before."""

    kind: Annotated[Literal["all", "host", "tag", "torch"], doc("Kind of the group.")]
    name: Annotated[str, doc("Name of the group; empty for all runs.")]
    week_began_ns: Annotated[int, doc("Begin of the week as Unix time, in nanoseconds.")]
    runs: Annotated[int, doc("Attempts of the week.")]
    runs_before: Annotated[int, doc("Attempts of the four weeks before.")]
    lost_share: Annotated[float, doc("Share of the week's known rank time that was lost.")]
    lost_share_before: Annotated[float, doc("The same of the four weeks before.")]
    chance: Chance
    text: Sentence


class RowsLeftOut(TypedDict):
    """Number of rows that did not fit, by table."""

    host: Annotated[int, doc("Hosts.")]
    tag: Annotated[int, doc("Tags.")]
    torch: Annotated[int, doc("Versions of torch.")]


class Fleet(FleetSum):
    """All runs of a workspace; each table has the 100 rows with the most lost hours."""

    weeks: Annotated[int, doc("Number of weeks.")]
    tag: Annotated[str | None, doc("The only tag; null for all runs.")]
    began_ns: Annotated[int, doc("Begin of the first week as Unix time, in nanoseconds.")]
    until_ns: Annotated[int, doc("The present as Unix time, in nanoseconds.")]
    by_week: Annotated[list[FleetWeek], doc("Weeks with runs, the oldest first.")]
    by_host: Annotated[list[FleetGroup], doc("Hosts.")]
    by_tag: Annotated[list[FleetGroup], doc("Tags; a run counts under each of its tags.")]
    by_torch: Annotated[list[FleetGroup], doc("Versions of torch.")]
    rows_left_out: Annotated[RowsLeftOut, doc("Rows that did not fit.")]
    slow_hosts: Annotated[
        list[SlowHostRow], doc("Hosts that are slow in different jobs of the workspace, the most certain first.")
    ]
    slow_hosts_since_ns: Annotated[int, doc("Begin of the comparison of hosts as Unix time, in nanoseconds.")]
    compared_runs: Annotated[int, doc("Ended runs since then whose hosts were compared.")]
    false_alarms: Annotated[float, doc("Maximum probability that a host as fast as the others is named at any time.")]
    regressions: Annotated[list[RegressionRow], doc("Groups that lose more than before, the most certain first.")]
    missing: Annotated[list[str], doc("Questions that could not be answered, each with the reason.")]


@router.get("/fleet", response_model=Fleet)
def get_fleet(
    caller: Reader,
    reports: ReportsDep,
    weeks: Annotated[int, Query(ge=1, le=104, description="Number of weeks, with the present one.")] = 12,
    tag: Annotated[str | None, Query(max_length=64, description="Only runs with this tag.")] = None,
) -> Response:
    """Rank-hours and lost hours of all runs by week, cause, host, tag and version of torch.

    `slow_hosts` names hosts that are slow in different jobs, `regressions` groups of runs that lose more than before.
    A run appears within ten minutes, and with its final values some minutes after its end.
    """
    return json_response(reports.fleet(caller.workspace, weeks, time.time_ns(), tag))
