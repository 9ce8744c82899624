"""The result types of the analysis: findings, and questions that could not be judged."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]
_ORDER = {"critical": 0, "warning": 1, "info": 2}
_FIRST = ("crash", "hang", "not-reduced", "replicas-differ")
"""Codes that come before all others of their severity: the run does not train, or trains the wrong model."""


@dataclass(frozen=True)
class Gain:
    """Predicted saving per step if the remedy works: time, share of `whole`, and the relative error of both.

    `whole` is `step`, or `run` for the run's wall time.
    """

    step_ns: int
    ratio: float
    error_ratio: float
    whole: Literal["step", "run"] = "step"


@dataclass(frozen=True)
class Interval:
    """Steps `from` to `to` in which a finding held, and when they began and ended: Unix time, None if unknown."""

    first: int
    last: int
    began_ns: int | None = None
    ended_ns: int | None = None

    def as_json(self) -> dict[str, int | None]:
        """Return the interval in the form of the REST API."""
        return {"from": self.first, "to": self.last, "began_ns": self.began_ns, "ended_ns": self.ended_ns}


@dataclass(frozen=True)
class Finding:
    """One problem of a run, with its place, its evidence, a remedy and the predicted gain.

    Attributes:
        steps: First and last step that the evidence rests on.
        intervals: Steps in which the problem held; empty if they are all of `steps`.
    """

    code: str
    severity: Severity
    title: str
    remedy: str
    steps: tuple[int, int]
    ranks: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    phase: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    gain: Gain | None = None
    intervals: tuple[Interval, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the finding in the form of the REST API."""
        intervals = [interval.as_json() for interval in self.intervals or (Interval(*self.steps),)]
        return asdict(self) | {"steps": list(self.steps), "intervals": intervals}


@dataclass(frozen=True)
class NotJudged:
    """A question that the evidence could not answer, and the reason."""

    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


def format_ranks(ranks: list[int]) -> str:
    """Format ranks for a sentence; a long list is cut after 20 ranks."""
    return ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")


def by_severity(findings: list[Finding]) -> list[Finding]:
    """Sort findings, the most severe first; within a severity crashes and hangs, then the largest gain first."""

    def order(finding: Finding) -> tuple[int, int, int, str]:
        first = _FIRST.index(finding.code) if finding.code in _FIRST else len(_FIRST)
        gain_ns = finding.gain.step_ns if finding.gain else 0
        return _ORDER[finding.severity], first, -gain_ns, finding.code

    return sorted(findings, key=order)


def severity_of(share: float) -> Severity:
    """Return the severity of losing this share of the steps' time, or of the run's."""
    if share >= 0.25:
        return "critical"
    return "warning" if share >= 0.1 else "info"
