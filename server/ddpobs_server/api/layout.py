"""Routes of buckets: their parameters, their mean times, and the parameters without a gradient."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response
from typing_extensions import TypedDict

from ddpobs.shared.words import bucket_title, parts_of
from ddpobs_server.api.concurrency import ConcurrencyLimitedRoute
from ddpobs_server.api.deps import AttemptDep, ModuleQuery, RunDep, StoreDep
from ddpobs_server.api.fields import (
    AttemptResponse,
    BucketIndex,
    LeftOut,
    ModuleNumber,
    Name,
    RankId,
    Revision,
    StepCount,
    StepNumber,
    doc,
)
from ddpobs_server.api.responses import json_response, within_response
from ddpobs_server.store import BucketRollup, LayoutOutline

router = APIRouter(prefix="/api/v1", tags=["runs"], route_class=ConcurrencyLimitedRoute)

_MAX_BUCKETS = 50_000
"""Maximum buckets in a response: of all modules and revisions."""


class Module(TypedDict):
    """A DDP module of the process."""

    module: ModuleNumber
    name: Name


class Parameter(TypedDict):
    """A parameter; `size` counts elements."""

    name: Name
    size: Annotated[int, doc("Number of elements.")]


class LaidOutBucket(TypedDict):
    """A bucket's parameters, or those of a collective of a fully sharded unit."""

    bucket: BucketIndex
    size_bytes: Annotated[int, doc("Size of the bucket, in bytes.")]
    dtype: Annotated[str, doc("Type of the gradients.")]
    parameters: Annotated[list[Parameter], doc("The bucket's parameters.")]
    kind: Annotated[str, doc("`bucket`, or the unit's collective, such as `all_gather_again` (in backward).")]
    unit: Annotated[str, doc("Name of the unit; empty for a bucket.")]
    title: Annotated[str, doc("Its name in words: `bucket 0.2`, or `reduce-scatter of unit blocks.3`.")]


class Layout(Module):
    """The buckets of a module, in launch order."""

    revision: Revision
    comm: Annotated[str, doc("Strategy of communication.")]
    noun: Annotated[
        str, doc("What `buckets` holds: `bucket`, or `unit` for the collectives of a sharded model's units.")
    ]
    buckets: Annotated[list[LaidOutBucket], doc("The buckets, in launch order.")]


class Layouts(AttemptResponse):
    """By module and revision; `left_out` counts the layouts that did not fit."""

    layouts: Annotated[list[Layout], doc("The layouts, by module and revision.")]
    left_out: LeftOut


class Bucket(TypedDict):
    """Mean times of a bucket; size, type and number of parameters are null without its layout."""

    module: ModuleNumber
    revision: Revision
    bucket: BucketIndex
    size_bytes: Annotated[int | None, doc("Size of the bucket, in bytes; null without a layout.")]
    dtype: Annotated[str | None, doc("Type of the gradients; null without a layout.")]
    parameters: Annotated[int | None, doc("Number of parameters; null without a layout.")]
    steps: StepCount
    compute_ns: Annotated[
        int, doc("Mean time from the readiness of the bucket before to this bucket's, in nanoseconds.")
    ]
    comm_ns: Annotated[int, doc("Mean time from a bucket's launch to its end, in nanoseconds.")]
    exposed_ns: Annotated[int, doc("Mean time of communication that backward did not hide, in nanoseconds.")]


class Buckets(AttemptResponse):
    """By module, revision and index; `complete` is false if there are more."""

    buckets: Annotated[list[Bucket], doc("The buckets, in launch order.")]
    complete: Annotated[bool, doc("Whether the response has all of them.")]


class UnusedSet(TypedDict):
    """Parameters without a gradient, by name, on the rank and on all ranks."""

    rank: RankId
    step: StepNumber
    module: ModuleNumber
    locally: Annotated[list[str], doc("Names of the parameters that the rank did not use.")]
    globally: Annotated[list[str], doc("Names of the parameters that no rank used.")]


class UnusedSets(AttemptResponse):
    """Each time a set changed; `left_out` counts the sets that did not fit."""

    unused: Annotated[list[UnusedSet], doc("The sets, by rank, oldest first.")]
    left_out: LeftOut


@router.get("/runs/{run}/layout", response_model=Layouts)
def get_layout(run: RunDep, attempt: AttemptDep, store: StoreDep, module: ModuleQuery = None) -> Response:
    """Parameters of each bucket, by module and revision.

    `left_out` counts the layouts that did not fit into 16 MB; request them with `module`.
    """
    stored, left_out = store.layouts(run.run, attempt, module)
    layouts = [
        {
            "module": layout.module,
            "name": layout.name,
            "revision": layout.revision,
            "comm": layout.comm,
            "noun": parts_of(layout.buckets).noun,
            "buckets": [
                {"bucket": index, **msgspec.structs.asdict(bucket), "title": bucket_title(layout.module, index, bucket)}
                for index, bucket in enumerate(layout.buckets)
            ],
        }
        for layout in stored
    ]
    return json_response({"run": run.name, "attempt": attempt, "layouts": layouts, "left_out": left_out})


@router.get("/runs/{run}/buckets", response_model=Buckets)
def get_buckets(run: RunDep, attempt: AttemptDep, store: StoreDep, module: ModuleQuery = None) -> Response:
    """Mean times of each bucket over all ranks and steps; `complete` is false if there are more than 50,000 buckets."""
    outlines = {(outline.module, outline.revision): outline for outline in store.layout_outlines(run.run, attempt)}
    rows, is_short = store.bucket_rollups(run.run, attempt, _MAX_BUCKETS)
    buckets = [
        _bucket_json(row, outlines.get((row.module, row.revision))) for row in rows if module in (None, row.module)
    ]
    return json_response({"run": run.name, "attempt": attempt, "buckets": buckets, "complete": not is_short})


@router.get("/runs/{run}/unused", response_model=UnusedSets)
def get_unused(
    run: RunDep,
    attempt: AttemptDep,
    store: StoreDep,
    module: ModuleQuery = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Maximum sets of a response.")] = 1000,
) -> Response:
    """Names of unused parameters at each change of the set: each rank's latest sets, by rank, the oldest first.

    `left_out` counts the sets within `limit` whose names did not fit into the response.
    """
    stored, left_out = store.unused(run.run, attempt, module, limit)
    fitting, beyond = within_response(stored)
    unused = [{"rank": rank, **msgspec.structs.asdict(record)} for rank, record in fitting]
    return json_response({"run": run.name, "attempt": attempt, "unused": unused, "left_out": left_out + beyond})


def _bucket_json(row: BucketRollup, outline: LayoutOutline | None) -> Bucket:
    if outline is not None and row.bucket >= len(outline.dtypes):
        outline = None
    return {
        "module": row.module,
        "revision": row.revision,
        "bucket": row.bucket,
        "size_bytes": int(outline.size_bytes[row.bucket]) if outline else None,
        "dtype": outline.dtypes[row.bucket] if outline else None,
        "parameters": int(outline.parameters[row.bucket]) if outline else None,
        "steps": row.steps,
        "compute_ns": row.compute_ns // row.steps,
        "comm_ns": row.comm_ns // row.steps,
        "exposed_ns": row.exposed_ns // row.steps,
    }
