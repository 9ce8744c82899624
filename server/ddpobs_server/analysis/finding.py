"""What the analysis tells: findings, most severe first."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]
_ORDER = {"critical": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class Gain:
    """What the remedy is predicted to save per step: time, share of the step, and the relative error of both."""

    step_ns: int
    ratio: float
    error_ratio: float


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: who, where, since when, how sure, what to do, and what that would gain."""

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

    def as_json(self) -> dict[str, Any]:
        """The finding as the REST gives it."""
        return asdict(self) | {"steps": list(self.steps)}


@dataclass(frozen=True)
class NotJudged:
    """Why a finding could not be judged."""

    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


def format_ranks(ranks: list[int]) -> str:
    """Ranks as a sentence has them: the first few of many."""
    return ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")


def by_severity(findings: list[Finding]) -> list[Finding]:
    """Most severe first; within a severity by what can be gained."""
    return sorted(findings, key=lambda f: (_ORDER[f.severity], -(f.gain.step_ns if f.gain else 0), f.code))


def severity_of(share: float) -> Severity:
    """How bad it is to lose this share of every step."""
    if share >= 0.25:
        return "critical"
    return "warning" if share >= 0.1 else "info"
