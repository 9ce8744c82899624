"""Finding `bucket-size`: another `bucket_cap_mb` is predicted to make the steps faster."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs.shared.quantities import duration
from ddpobs.whatif.fit import present_buckets
from ddpobs.whatif.model import Change, Fitted
from ddpobs.wire.facts import SettingFacts, read_facts
from ddpobs_server.analysis.communication.fitted_steps import COMPILED_BUCKETS, has_compiled_buckets
from ddpobs_server.analysis.communication.predicted_gain import exposes_communication, gain_of, steady_fit_of
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, advice_severity

CODES = ("bucket-size",)
CAPS_MB = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
"""Limits that are replayed; 25 is DDP's default."""


@dataclass(frozen=True)
class BucketSizeFacts(Facts):
    """The present buckets, and what other limits save.

    Attributes:
        bucket_cap_mb: The present limit in MB; None if it is not reported.
        bucket_bytes: Sizes of the present buckets, in launch order.
        exposed_ns: Exposed communication of a step.
        replay_error_ns: Error of the replay.
        saved_ns_by_cap_mb: Predicted saving of a step in nanoseconds, by limit in MB.
    """

    bucket_cap_mb: float | None
    bucket_bytes: list[int]
    exposed_ns: int
    replay_error_ns: int
    saved_ns_by_cap_mb: dict[str, int]


FACTS = (BucketSizeFacts,)


def bucket_size(evidence: Evidence) -> Judgement:
    """Judge the time that a step would save with other sizes of buckets, filled in the present order."""
    if has_compiled_buckets(evidence):
        return [NotJudged("bucket-size", COMPILED_BUCKETS)]
    if evidence.columns is None or not exposes_communication(evidence) or not evidence.columns.layouts():
        return []
    if len({layout.module for layout in evidence.columns.layouts()}) > 1:
        return []
    fitted = steady_fit_of(evidence)
    if isinstance(fitted, str):
        return [NotJudged("bucket-size", fitted)]
    found = {cap: gain_of(fitted, Change(caps_mb=(cap,))) for cap in CAPS_MB}
    gains = {cap: gain for cap, gain in found.items() if gain is not None}
    if not gains:
        return []
    cap = max(gains, key=lambda cap: gains[cap].step_ns)
    return [_finding(evidence, fitted, cap, gains)]


def _finding(evidence: Evidence, fitted: Fitted, cap: float, gains: dict[float, Gain]) -> Finding:
    sizes = present_buckets(fitted.typical)[1]
    settings, gain = read_facts(evidence.settings, SettingFacts), gains[cap]
    present = settings.bucket_cap_mb
    instead = f"instead of {present:g}, " if present is not None else ""
    return Finding(
        code="bucket-size",
        severity=advice_severity(gain),
        verdict=f"bucket_cap_mb={cap:g} would make steps faster",
        measure=f"{instead}with {len(sizes)} buckets now",
        cause=f"backward does not hide {duration(fitted.exposed_ns)} of communication a step",
        remedy=_remedy(cap, settings),
        steps=evidence.step_range,
        phase="exposed_comm",
        gain=gain,
        evidence=BucketSizeFacts(
            bucket_cap_mb=present,
            bucket_bytes=[round(size) for size in sizes.tolist()],
            exposed_ns=round(fitted.exposed_ns),
            replay_error_ns=round(fitted.replay_error_ns),
            saved_ns_by_cap_mb={f"{tried:g}": gain.step_ns for tried, gain in gains.items()},
        ),
    )


def _remedy(cap: float, settings: SettingFacts) -> str:
    """What to set, and in which line."""
    place = f" where the module is wrapped ({settings.wrapped_at})" if settings.wrapped_at else ""
    tuned = ' `bucket_cap_mb="auto"` tries it in the training itself.' if settings.reducer == "ddpobs" else ""
    return f"Set bucket_cap_mb={cap:g}{place}, and compare the step time of some hundred steps.{tuned}"
