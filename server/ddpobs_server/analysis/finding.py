"""The result types of the analysis: findings, and questions that could not be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ddpobs.shared.quantities import duration, rank_time
from ddpobs.shared.words import MAX_NAMED_PARAMETERS, percent
from ddpobs_server.analysis.evidence_text import evidence_sentences

_EVERY_STEP = 0.98
"""Share of the steps above which something happens in every step. The first steps of a run are often incomplete."""
Severity = Literal["info", "warning", "critical"]
_MAX_ERROR_RATIO = 0.5
"""Relative error up to which a gain is stated with its error; above, only its upper bound is."""
_MIN_WHOLE = 0.005
"""Minimum error that is stated in whole percent: a smaller one would be written as 0."""
_ORDER = {"critical": 0, "warning": 1, "info": 2}
_FIRST = ("crash", "hang", "lost", "not-reduced", "replicas-differ")
"""Codes that come before all others of their severity: the run does not train, or trains the wrong model."""


@dataclass(frozen=True)
class Gain:
    """Predicted saving per step if the remedy works: time, share of `whole`, and the relative error of both.

    `whole` is `step`, or `run` for the run's wall time, of which `run_ns` is saved. `text` is the saving in words, the
    only form in which it is shown; empty if nothing is saved.
    """

    step_ns: int
    ratio: float
    error_ratio: float
    whole: Literal["step", "run"] = "step"
    run_ns: int = 0
    text: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self._in_words())

    def at_most(self, delay_ns: float) -> Gain:
        """Return a saving of no more than the delay that a finding names."""
        if self.step_ns <= delay_ns:
            return self
        ratio = round(self.ratio * delay_ns / self.step_ns, 4)
        return Gain(round(delay_ns), ratio, self.error_ratio, self.whole)

    def _in_words(self) -> str:
        if self.step_ns <= 0 or self.ratio <= 0:
            return ""
        if self.whole == "run":
            run_ns = self.run_ns / self.ratio
            return f"at most {duration(self.run_ns)} of the run's {duration(run_ns)} ({percent(self.ratio)})"
        step_ns, error = self.step_ns / self.ratio, self.ratio * self.error_ratio
        if self.error_ratio > _MAX_ERROR_RATIO:
            most = min(1.0, self.ratio + error)
            return f"at most {duration(step_ns * most)} of {duration(step_ns)} a step ({percent(most)})"
        digits = int(error < _MIN_WHOLE)
        share = f"{100 * self.ratio:.{digits}f} ± {100 * error:.{digits}f} %".replace(" ± 0.0", "")
        return f"{duration(self.step_ns)} of {duration(step_ns)} a step ({share})"


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
class Facts:
    """The figures that a finding rests on. Each kind of finding has a class of its own, which the API publishes."""


@dataclass(frozen=True)
class Finding:
    """One problem of a run, with its place, its evidence, a remedy and the predicted gain.

    Whatever shows a finding prints its parts, in this order: verdict, measure, when, cause, where, remedy, gain.

    Attributes:
        verdict: One fact in at most twelve words, without a full stop: `Rank 1 is slow in backward since step 150`.
        remedy: What to do, in one or two sentences.
        steps: First and last step that the evidence rests on.
        measure: The figure with what it is a share of: `30.0 ms more than the other ranks in 89 % of the steps`.
        when: The steps and their times, where the verdict does not name them.
        cause: The reason, or `not known, because …`; empty if the verdict is the cause.
        where: Host, process, and bucket with its first parameters; see `ddpobs.shared.words.format_bucket`.
        intervals: Steps in which the problem held; empty if they are all of `steps`.
    """

    code: str
    severity: Severity
    verdict: str
    remedy: str
    steps: tuple[int, int]
    measure: str = ""
    when: str = ""
    cause: str = ""
    where: str = ""
    ranks: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    phase: str | None = None
    evidence: Facts = field(default_factory=Facts)
    gain: Gain | None = None
    intervals: tuple[Interval, ...] = ()

    @property
    def title(self) -> str:
        """The verdict with measure, time and cause in one line, for what shows only one."""
        reasons = "; ".join(filter(None, (self.measure, self.when)))
        if self.cause:
            reasons = f"{reasons}; cause: {self.cause}" if reasons else self.cause
        return f"{self.verdict}: {reasons}" if reasons else self.verdict

    def as_json(self) -> dict[str, Any]:
        """Return the finding in the form of the REST API."""
        intervals = [interval.as_json() for interval in self.intervals or (Interval(*self.steps),)]
        return asdict(self) | {
            "title": self.title,
            "evidence_sentences": evidence_sentences(self.evidence),
            "steps": list(self.steps),
            "intervals": intervals,
        }


@dataclass(frozen=True)
class NotJudged:
    """A question that the evidence could not answer, and the reason."""

    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


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


def advice_severity(gain: Gain) -> Severity:
    """Return the severity of a possible gain: at most a warning, because nothing is wrong with the run."""
    return "info" if severity_of(gain.ratio) == "info" else "warning"


def waiting_text(delay_ns: float, ranks: int) -> str:
    """The loss to a late rank in words: in its delay the other ranks wait, as the account counts it."""
    return f"{rank_time(delay_ns * (ranks - 1))} of waiting"


def how_often(share: float) -> str:
    """A share of the steps in words: `every step`, `89 % of the steps`."""
    return "every step" if share > _EVERY_STEP else f"{percent(share)} of the steps"


def first_names(names: Sequence[str], count: int | None = None) -> str:
    """The first of `count` names: `a.weight, a.bias, b.weight and 7 more`."""
    more = (count if count is not None else len(names)) - MAX_NAMED_PARAMETERS
    return ", ".join(names[:MAX_NAMED_PARAMETERS]) + (f" and {more} more" if more > 0 else "")
