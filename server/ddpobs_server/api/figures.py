"""Routes of pictures: for BokehJS on the page, and all of them in one file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import HTMLResponse
from typing_extensions import TypedDict

from ddpobs.shared.quantities import time_of_day, time_range
from ddpobs.shared.words import fact_text
from ddpobs.wire.endings import IMPORTED
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import (
    AttemptDep,
    RankQuery,
    Reader,
    ReportsDep,
    RunDep,
    SettingsDep,
    StepRangeDep,
    StoreDep,
)
from ddpobs_server.api.fields import AttemptResponse, Title, doc
from ddpobs_server.api.responses import json_response
from ddpobs_server.figures.pictures import Pictures
from ddpobs_server.figures.registry import NAMES, figure_kinds
from ddpobs_server.figures.report_policy import report_policy
from ddpobs_server.figures.report_tables import report_tables
from ddpobs_server.figures.selection import Order, Selection
from ddpobs_server.reports.attempts import AttemptOutcome
from ddpobs_server.reports.run_state import state_of_run
from ddpobs_server.store import Source
from ddpobs_server.web.security_headers import POLICY
from ddpobs_server.web.services import ServicesDep

router = APIRouter(prefix="/api/v1", tags=["figures"], route_class=ConcurrencyLimitedRoute)


class FigureKind(TypedDict):
    """A figure that a run has, and the query parameters that select what it shows."""

    figure: Annotated[str, doc("Name of the figure.")]
    title: Title
    selection: Annotated[list[str], doc("Query parameters that select what the figure shows.")]


class Figures(TypedDict):
    """All figures, in the order of the page."""

    figures: Annotated[list[FigureKind], doc("The figures, in the order of the page.")]


class FigureTable(TypedDict):
    """The content of a figure as text, at most 100 rows."""

    columns: Annotated[list[str], doc("Titles of the columns.")]
    rows: Annotated[list[list[str | int]], doc("Rows of the table.")]


class Figure(AttemptResponse):
    """A figure. `item` is a BokehJS item, null if there is nothing to draw; `summary` says what it shows, or why not.

    `shown` has the steps, the ranks and the step that are drawn.
    """

    figure: Annotated[str, doc("Name of the figure.")]
    title: Title
    summary: Annotated[str, doc("The content of the figure in words, or the reason for its absence.")]
    item: Annotated[dict[str, Any] | None, doc("The figure for BokehJS; null if there is nothing to draw.")]
    height: Annotated[int, doc("Height of the figure in pixels; 0 if there is nothing to draw.")]
    table: Annotated[FigureTable, doc("The content of the figure as text.")]
    shown: Annotated[dict[str, Any], doc("Steps, ranks and step that are drawn.")]


def _pictures(services: ServicesDep) -> Pictures:
    return services.pictures


PicturesDep = Annotated[Pictures, Depends(_pictures)]


def _selection(
    steps: StepRangeDep,
    rank: RankQuery = None,
    step: Annotated[int | None, Query(ge=0, le=2**62 - 1, description="The step of the figure `step`.")] = None,
    bucket: Annotated[
        str,
        Query(
            pattern=r"^(\d{1,7}\.\d{1,7})?$",
            description="The bucket that the figure `step` is about, as MODULE.BUCKET.",
        ),
    ] = "",
    match: Annotated[
        str, Query(max_length=200, description="Ranks, ranges of ranks, or a part of a host's name.")
    ] = "",
    order: Annotated[Order, Query(description="Order of the ranks.")] = "cost",
    dark: Annotated[bool, Query(description="Colours of a dark page.")] = False,
    legend: Annotated[int, Query(ge=1, le=9, description="Columns of a legend.")] = 9,
) -> Selection:
    return Selection(steps.first, steps.last, rank, step, bucket, match, order, dark, legend)


FigureName = Annotated[
    str, Path(description="Name of the figure.", pattern=f"^({'|'.join(NAMES)})$", json_schema_extra={"enum": [*NAMES]})
]
SelectionDep = Annotated[Selection, Depends(_selection)]


@router.get("/figures", response_model=Figures)
def get_figures(_caller: Reader) -> Response:
    """The figures of a run, in the order of its page, with the query parameters that select what each shows."""
    kinds = figure_kinds().values()
    known = [{"figure": kind.name, "title": kind.title, "selection": kind.selection} for kind in kinds]
    return json_response({"figures": known})


# Before the route of JSON, whose path matches this one as well.
@router.get("/runs/{run}/figures/{figure}.html", response_class=HTMLResponse)
def get_figure_page(
    figure: FigureName, run: RunDep, attempt: AttemptDep, selection: SelectionDep, pictures: PicturesDep
) -> HTMLResponse:
    """A figure of an attempt as one HTML file, for a notebook. It needs no other file."""
    html, nonce = pictures.page(run.run, attempt, figure, selection)
    return _html_file(html, nonce)


@router.get("/runs/{run}/figures/{figure}", response_model=Figure)
def get_figure(
    figure: FigureName, run: RunDep, attempt: AttemptDep, selection: SelectionDep, pictures: PicturesDep
) -> Response:
    """A figure of an attempt: `item` is for BokehJS, `summary` and `table` are its content as text.

    `/figures` lists the names.
    """
    picture = pictures.picture(run.run, attempt, figure, selection)
    return json_response({"run": run.name, "attempt": attempt, **picture})


@router.get("/runs/{run}/report.html", response_class=HTMLResponse)
def get_report(
    run: RunDep,
    attempt: AttemptDep,
    store: StoreDep,
    settings: SettingsDep,
    pictures: PicturesDep,
    reports: ReportsDep,
    request: Request,
) -> HTMLResponse:
    """A report of an attempt as one HTML file: findings, figures, ranks, settings. It needs no other file."""
    sources, outcomes = store.sources(run.run, attempt), reports.attempts(run)
    hello = next((source.hello for source in sources if source.hello), None)
    facts = {"attempt": attempt, "ranks": f"{len(sources)} of {run.world_size}"}
    if attempt == run.attempt:
        facts["state"] = state_of_run(run, settings, time.time_ns())
    if sources:
        outcome = next((one for one in outcomes if one.attempt == attempt), None)
        facts["steps"] = f"{outcome.steps if outcome else 0:,}"
        facts |= _times(sources, outcome)
    known = (
        {} if hello is None else {"backend": hello.backend, "device": hello.device, **hello.versions, **hello.settings}
    )
    texts = {name.replace("_", " "): fact_text(value) for name, value in known.items()}
    tables = report_tables(sources, outcomes, store.latest_unused(run.run, attempt)[0], texts)
    page = f"{(settings.public_url or str(request.base_url)).rstrip('/')}/runs/{quote(run.name)}"
    html, nonce = pictures.report(run.run, attempt, page, facts, tables=tables)
    return _html_file(html, nonce)


def _times(sources: Sequence[Source], outcome: AttemptOutcome | None) -> dict[str, str]:
    """When an attempt ran; of imported files what they cover, if known, and their upload."""
    is_imported = any(source.ended == IMPORTED for source in sources)
    uploaded = {"uploaded": time_of_day(min(source.first_seen_ns for source in sources))} if is_imported else {}
    if outcome is None or outcome.began_ns is None:
        return uploaded
    if outcome.ended_ns is None:
        return {"began": time_of_day(outcome.began_ns)} | uploaded
    covered = time_range(outcome.began_ns, outcome.ended_ns, is_dated=True)
    return {"recorded" if is_imported else "ran": covered} | uploaded


def _html_file(html: str, nonce: str) -> HTMLResponse:
    return HTMLResponse(html, headers={POLICY: f"{report_policy(nonce)}; frame-ancestors 'none'"})
