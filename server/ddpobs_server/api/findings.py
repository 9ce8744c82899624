"""Schemas of findings, which diagnoses and comparisons share."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Literal

from typing_extensions import TypedDict

from ddpobs_server.analysis.finding import Facts, Severity
from ddpobs_server.analysis.findings.registry import FACTS
from ddpobs_server.api.fields import StepNs, Title, doc

if TYPE_CHECKING:
    Evidence = Facts  # mypy cannot read the union, which grows with the registry.
else:
    Evidence = reduce(or_, FACTS)


class Gain(TypedDict):
    """Predicted saving per step if the remedy works."""

    step_ns: Annotated[int, doc("Time that the remedy would save in each step, in nanoseconds.")]
    ratio: Annotated[float, doc("Share of `whole` that the remedy would save.")]
    error_ratio: Annotated[float, doc("Relative error of the gain.")]
    whole: Annotated[
        Literal["step", "run"], doc("The whole that `ratio` is a share of: a step, or the run's wall time.")
    ]
    run_ns: Annotated[int, doc("Time of the run that the remedy would save, in nanoseconds; 0 if `whole` is a step.")]
    text: Annotated[str, doc("The saving in words, with what it is a share of; empty if nothing is saved.")]


_Bounds = TypedDict("_Bounds", {"from": Annotated[int, doc("First step.")], "to": Annotated[int, doc("Last step.")]})


class Interval(_Bounds):
    """Steps, and when they began and ended: Unix time, null if unknown."""

    began_ns: Annotated[int | None, doc("Begin as Unix time, in nanoseconds; null if it is not known.")]
    ended_ns: Annotated[int | None, doc("End as Unix time, in nanoseconds; null if it is not known.")]


class StepLevel(Interval):
    """Steps with about the same step time."""

    step_ns: StepNs


class FindingResponse(TypedDict):
    """One problem of the run. `steps` are those of the evidence; in `intervals` the problem held.

    Show its parts in this order: verdict, measure, when, cause, where, remedy, gain. Empty parts do not apply.
    """

    code: Annotated[str, doc("Code of the finding.")]
    severity: Annotated[Severity, doc("How severe the finding is.")]
    title: Title
    verdict: Annotated[str, doc("The finding as one fact of at most twelve words.")]
    measure: Annotated[str, doc("Figure of the finding, with what it is a share of.")]
    when: Annotated[str, doc("Steps and times of the finding, where the verdict does not name them.")]
    cause: Annotated[str, doc("Reason of the finding, or why it is not known; empty if the verdict is the reason.")]
    where: Annotated[str, doc("Host, process, and bucket with its first parameters.")]
    remedy: Annotated[str, doc("What to do.")]
    steps: Annotated[list[int], doc("First and last step that the evidence rests on.")]
    intervals: Annotated[list[Interval], doc("Steps in which the problem held.")]
    ranks: Annotated[list[int], doc("Ranks that the finding is about.")]
    buckets: Annotated[list[int], doc("Indices of the buckets that the finding is about.")]
    parameters: Annotated[list[str], doc("Names of the parameters that the finding is about.")]
    phase: Annotated[str | None, doc("Phase of the step; null if it is no single one.")]
    evidence: Annotated[Evidence, doc("Figures that the finding rests on, in the form of its code.")]
    evidence_sentences: Annotated[list[str], doc("The same figures in sentences, without zeros and unknown values.")]
    gain: Annotated[Gain | None, doc("Predicted saving if the remedy works; null if it is not known.")]
