"""The route of a run's account: where its wall time went."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import AttemptDep, ReportsDep, RunDep
from ddpobs_server.api.fields import AttemptId, Goodput, RankId, RankNs, RunName, StepCount, Title, doc
from ddpobs_server.api.own_cost import Telemetry
from ddpobs_server.api.responses import json_response

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["diagnosis"], route_class=ConcurrencyLimitedRoute)


class AccountPart(TypedDict):
    """A part of the wall time; `share` is of the run's, or of the attempt's, rank time."""

    part: Annotated[str, doc("Name of the part.")]
    group: Annotated[
        Literal["steps", "outside", "start_up", "restarts", "idle", "not_known"], doc("Group of the part.")
    ]
    group_title: Annotated[str, doc("The group in words.")]
    title: Title
    rank_ns: RankNs
    share: Annotated[float, doc("Share of the whole.")]
    hours: Annotated[float, doc("Hours of the part, in `unit`.")]
    cost: Annotated[float | None, doc("Cost at the price of an hour; null without a price.")]
    is_goodput: Annotated[bool, doc("Whether the part counts as goodput.")]
    is_lost: Annotated[bool, doc("Whether the part counts as lost.")]


class AccountRank(TypedDict):
    """Time of a rank by part; null with the reason if it is not known."""

    rank: RankId
    parts_ns: Annotated[dict[str, int] | None, doc("Time by part, in nanoseconds; null if it is not known.")]
    reason: Annotated[str | None, doc("The reason, in one line; null or empty without one.")]


class AccountTotal(TypedDict):
    """Parts add up to `rank_ns`, the wall time summed over the ranks. Times and costs are null if they are not known.

    `goodput` is the time in steps that no restart repeated, over the known wall time.
    """

    began_ns: Annotated[int | None, doc("Begin as Unix time, in nanoseconds; null if it is not known.")]
    until_ns: Annotated[int | None, doc("End of the account as Unix time, in nanoseconds; null if it is not known.")]
    wall_ns: Annotated[int | None, doc("Wall time, in nanoseconds; null if it is not known.")]
    rank_ns: RankNs
    goodput: Goodput
    lost_hours: Annotated[float, doc("Hours of the parts that are lost, in `unit`.")]
    lost_cost: Annotated[float | None, doc("Cost of the lost hours; null without a price.")]
    parts: Annotated[list[AccountPart], doc("Parts that add up to `rank_ns`.")]


class AttemptAccount(AccountTotal):
    """Account of an attempt; `ranks` is empty except for the requested attempt."""

    attempt: AttemptId
    ordinal: Annotated[int, doc("Number of the attempt, from 0.")]
    steps: StepCount
    repeated_steps: Annotated[int, doc("Steps that an earlier attempt had already done.")]
    ranks: Annotated[list[AccountRank], doc("The ranks.")]


class Account(AccountTotal):
    """Account of a run. Hours are GPU hours, or hours of ranks without a GPU: `unit`."""

    run: RunName
    attempt: AttemptId
    unit: Annotated[Literal["gpu-hour", "rank-hour"], doc("Unit of the hours.")]
    price_per_hour: Annotated[
        float | None, doc("Price of an hour of a GPU, or of a rank without one; null if it is not known.")
    ]
    summary: Annotated[
        str, doc("The account in a few sentences: goodput, work of the ranks, loss; empty if not known.")
    ]
    telemetry: Telemetry
    attempts_left_out: Annotated[int, doc("Number of the training's oldest attempts that the account does not cover.")]
    attempts: Annotated[list[AttemptAccount], doc("The training's attempts, oldest first.")]
    missing: Annotated[list[str], doc("Questions that could not be answered, each with the reason.")]


@router.get("/account", response_model=Account)
def get_account(run: RunDep, attempt: AttemptDep, reports: ReportsDep) -> Response:
    """Where the wall time of a training went, over its attempts: parts that add up, goodput, and hours lost by cause.

    Times are rank time: wall time times ranks. `attempt` selects the attempt whose ranks are listed. `missing` names
    the ranks whose time is not known, and why.
    """
    return json_response(reports.account(run.run, attempt))
