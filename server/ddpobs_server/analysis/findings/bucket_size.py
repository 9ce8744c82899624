"""Finding `bucket-size`: another `bucket_cap_mb` is predicted to make the steps faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ddpobs.shared.quantities import duration
from ddpobs.wire.facts import SettingFacts, read_facts
from ddpobs_server.analysis.communication import link_model
from ddpobs_server.analysis.communication.arrivals import arrivals
from ddpobs_server.analysis.communication.step_replay import (
    Replay,
    exposes_communication,
    steady_replay_of,
)
from ddpobs_server.analysis.evidence import ColumnReader, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, advice_severity
from ddpobs_server.analysis.steps.joined_steps import Floats

CODES = ("bucket-size",)
CAPS_MB = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
"""Limits that are replayed; 25 is DDP's default."""


@dataclass(frozen=True)
class BucketSizeFacts(Facts):
    """The present buckets, and what other limits save.

    Attributes:
        bucket_cap_mb: The present limit in MB; None if it is not reported.
        bucket_bytes: Sizes of the present buckets, in launch order.
        exposed_ns: Replayed exposed communication of a step.
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
    if evidence.columns is None or not exposes_communication(evidence) or not evidence.columns.layouts():
        return []
    replay = steady_replay_of(evidence)
    if isinstance(replay, str):
        return [NotJudged("bucket-size", replay)]
    if len(np.unique(replay.transfers.module)) > 1:
        return []
    gains = dict(_gains(evidence, evidence.columns, replay))
    if not gains:
        return []
    cap = max(gains, key=lambda cap: gains[cap].step_ns)
    return [_finding(evidence, replay, cap, gains)]


def _gains(evidence: Evidence, columns: ColumnReader, replay: Replay) -> Iterator[tuple[float, Gain]]:
    """Yield each limit in MB that is predicted to save time, with its gain.

    The error counts the replay of the present buckets twice: against its measurement, and from the parameters' arrival.
    """
    parameters = arrivals(evidence, columns)
    base_ns, error_ns = replay.now_ns, replay.error_ns
    if parameters is not None:
        base_ns = link_model.exposed_ns(*parameters.present_buckets(), replay.model)
        error_ns += abs(base_ns - replay.now_ns)
    for cap in CAPS_MB:
        cap_bytes = cap * 2**20
        if parameters is not None:
            ready_ns, sizes = parameters.buckets(cap_bytes)
        else:  # Only whole buckets can be merged.
            ready_ns, sizes = link_model.merge(replay.ready_ns, replay.sizes, cap_bytes)
        if _is_within(replay, sizes):
            saved_ns = base_ns - link_model.exposed_ns(ready_ns, sizes, replay.model)
            if (gain := replay.saving(saved_ns, error_ns)) is not None:
                yield cap, gain


def _is_within(replay: Replay, sizes: Floats) -> bool:
    """Whether the link is known for these sizes.

    Without a latency of its own, the model would promise most for the smallest buckets.
    """
    return replay.model.is_separated or float(np.median(sizes)) >= float(np.median(replay.sizes))


def _finding(evidence: Evidence, replay: Replay, cap: float, gains: dict[float, Gain]) -> Finding:
    present, gain = read_facts(evidence.settings, SettingFacts).bucket_cap_mb, gains[cap]
    instead = f"instead of {present:g}, " if present is not None else ""
    return Finding(
        code="bucket-size",
        severity=advice_severity(gain),
        verdict=f"bucket_cap_mb={cap:g} would make steps faster",
        measure=f"{instead}with {len(replay.sizes)} buckets now",
        cause=f"backward does not hide {duration(replay.now_ns)} of communication a step",
        remedy=f"Set bucket_cap_mb={cap:g}, and compare the step time of some hundred steps.",
        steps=evidence.step_range,
        phase="exposed_comm",
        gain=gain,
        evidence=BucketSizeFacts(
            bucket_cap_mb=present,
            bucket_bytes=[round(size) for size in replay.sizes.tolist()],
            exposed_ns=round(replay.now_ns),
            replay_error_ns=round(replay.error_ns),
            saved_ns_by_cap_mb={f"{tried:g}": gain.step_ns for tried, gain in gains.items()},
        ),
    )
