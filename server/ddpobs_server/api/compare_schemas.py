"""Schemas of the comparison of two runs."""

from __future__ import annotations

from pydantic import ConfigDict
from typing_extensions import TypedDict

from ddpobs_server.analysis.comparison.compare import Kind, Verdict
from ddpobs_server.api.schemas import AttemptResponse, FindingResponse

_DESCRIBED = ConfigDict(use_attribute_docstrings=True)


class ComparedRun(TypedDict):
    """One of the two runs."""

    __pydantic_config__ = _DESCRIBED  # type: ignore[misc]

    run: str
    """Name of the run."""
    attempt: str
    """Its attempt."""
    steps: int
    """Steps that are compared: the latest, without the first ten of the run and without long steps."""
    long_steps: int
    """Long steps among the latest: above the third quartile by more than three times the interquartile range."""
    run_delay_ns: int
    """Mean time per step in which a rank was ready to run and had no processor, in nanoseconds."""


class Change(TypedDict):
    """A change of one time from run a to run b, with its interval."""

    __pydantic_config__ = _DESCRIBED  # type: ignore[misc]

    name: str
    """`step`, `long steps`, a phase, or a bucket with its first parameter."""
    kind: Kind
    """Kind of time; `compute` and `comm` are a bucket's computation and communication."""
    verdict: Verdict
    """`same` if no difference was seen; `too-few` if there are too few steps to judge."""
    a_ns: int
    """Mean time per step of run a, in nanoseconds."""
    b_ns: int
    """Mean time per step of run b, in nanoseconds."""
    change_ns: int
    """Difference b - a, in nanoseconds."""
    low_ns: int
    """Lower end of the interval of the difference, in nanoseconds."""
    high_ns: int
    """Upper end of the interval of the difference, in nanoseconds."""
    smallest_ns: int
    """Least difference that would have been seen in 95 % of such pairs of runs, in nanoseconds."""
    change_ratio: float | None
    """Difference as a share of run a's time; null if that is zero."""
    low_ratio: float | None
    """Lower end of the interval as a share of run a's time; null if that is zero."""
    high_ratio: float | None
    """Upper end of the interval as a share of run a's time; null if that is zero."""
    smallest_ratio: float | None
    """Least difference that would have been seen, as a share of run a's time; null if that is zero."""
    step_share: float | None
    """Share that the time has of run a's step; null if that is zero."""


class Limit(TypedDict):
    """Whether run b is slower than the limit allows."""

    __pydantic_config__ = _DESCRIBED  # type: ignore[misc]

    ratio: float
    """The limit: a share of run a's time."""
    exceeded: list[str]
    """The step and the phases of which the whole interval is above the limit."""
    decided: bool
    """False if the steps are too few or too noisy to judge, or if other programs may explain the change."""


class Difference(TypedDict):
    """A setting, a version or a part of the layout that differs."""

    __pydantic_config__ = _DESCRIBED  # type: ignore[misc]

    name: str
    """Name of the fact."""
    a: str | int | float | bool | None
    """Value in run a; null if it has none."""
    b: str | int | float | bool | None
    """Value in run b; null if it has none."""


class ChangedFindings(TypedDict):
    """Findings by code, phase and ranks."""

    __pydantic_config__ = _DESCRIBED  # type: ignore[misc]

    came: list[FindingResponse]
    """Findings that only run b has."""
    went: list[FindingResponse]
    """Findings that only run a has."""
    stayed: list[FindingResponse]
    """Findings that both have, as of run b."""


class Comparison(AttemptResponse):
    """Run b against run a, the run in the address."""

    __pydantic_config__ = _DESCRIBED  # type: ignore[misc]

    a: ComparedRun
    """The run in the address."""
    b: ComparedRun
    """The run in `with`."""
    confidence: float
    """Confidence of the step's interval; all phases together have the same, and all buckets together."""
    changes: list[Change]
    """The step first, then long steps, phases and the buckets that have the same parameters in both runs."""
    too_few: str
    """A sentence if the steps are too few to judge; else empty."""
    limit: Limit
    """Judgement by `limit`."""
    disturbed: bool
    """True if the time without a processor changed by at least half of the step's change."""
    differences: list[Difference]
    """Settings, versions and layout that differ."""
    findings: ChangedFindings
    """Findings that came, went and stayed."""
