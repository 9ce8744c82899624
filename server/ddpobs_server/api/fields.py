"""Fields that several responses share: each means the same everywhere."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict  # Before Python 3.12 pydantic accepts only these.


def doc(description: str) -> FieldInfo:
    """The description of a field: what it means, its unit, and when it is null."""
    return Field(description=description)  # type: ignore[no-any-return]


Facts = dict[str, str | int | float | bool | None]
PhaseTimes = dict[str, int]
"""Nanoseconds by phase."""

AttemptId = Annotated[str, doc("Id of the attempt: 16 hexadecimal digits.")]
BucketIndex = Annotated[int, doc("Index of the bucket in its layout.")]
Dropped = Annotated[int, doc("Records that the ranks dropped.")]
Emitted = Annotated[int, doc("Records that the ranks made.")]
Goodput = Annotated[
    float | None, doc("Share of the wall time in steps that no restart repeated; null if it is not known.")
]
HostName = Annotated[str, doc("Name of the host.")]
LastSeenNs = Annotated[int, doc("Arrival of the last batch, as Unix time, in nanoseconds.")]
LeftOut = Annotated[int, doc("Number that did not fit into the response.")]
Missing = Annotated[list[str], doc("Findings that could not be judged, each with the reason.")]
ModuleNumber = Annotated[int, doc("Number of the DDP module in its process.")]
Name = Annotated[str, doc("Name.")]
NextStep = Annotated[int | None, doc("Where the next page begins; null at the end.")]
RankId = Annotated[int, doc("Number of the rank.")]
RankNs = Annotated[int, doc("Wall time summed over the ranks, in nanoseconds.")]
Revision = Annotated[int, doc("Number of the layout within its module.")]
RunName = Annotated[str, doc("Name of the run.")]
StepCount = Annotated[int, doc("Number of steps.")]
StepNs = Annotated[int, doc("Time of a step, in nanoseconds.")]
StepNumber = Annotated[int, doc("Number of the step.")]
Title = Annotated[str, doc("The finding or the part in words.")]
VerdictKind = Annotated[
    Literal["findings", "too-early", "too-short", "not-compared", "well"],
    doc("What the run is; `summary` has it in words."),
]
VerdictText = Annotated[str, doc("The verdict on a run without findings, in one sentence; empty with findings.")]
WorldSize = Annotated[int, doc("Number of ranks that the training has.")]


class AttemptResponse(TypedDict):
    """Base of the responses about one attempt of a run."""

    run: RunName
    attempt: AttemptId
