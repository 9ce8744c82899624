"""Finding `comm-bound`: communication that no computation hides takes a large share of the steps' time.

Waiting for a late rank is not part of it: that is the straggler's. The finding has a kind: bandwidth,
latency, or processor; with a fully sharded model also late launches. Without the evidence for a kind it gives the
reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpobs.shared.delay import moving
from ddpobs.shared.quantities import duration
from ddpobs.shared.words import collective_title, format_ranks, percent
from ddpobs.whatif.model import Change
from ddpobs_server.analysis.communication.comm_kind import CommKind, disturbed_kind, unknown_kind
from ddpobs_server.analysis.communication.fitted_steps import fitted_steps
from ddpobs_server.analysis.communication.predicted_gain import gain_of
from ddpobs_server.analysis.communication.processors import Shortage, shortage
from ddpobs_server.analysis.communication.step_replay import Replay, disturbed_share, replay_of
from ddpobs_server.analysis.communication.transfers import Transfers
from ddpobs_server.analysis.communication.unit_kind import unit_facts, unit_kind, waiting_within_ns
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, severity_of
from ddpobs_server.analysis.slow_ranks.lateness import step_weights
from ddpobs_server.analysis.steps.joined_steps import Floats

CODES = ("comm-bound",)
COMM_SHARE = 0.3
"""Maximum share of exposed communication in the steps' time that is no finding."""
_DEFAULT_CAP_MB = 25.0
_COMPRESS = (
    "Compress gradients (comm='bf16'), accumulate over several micro-batches with no_sync, or use a faster link."
)
_MERGE = (
    "Reduce fewer and larger buckets: raise bucket_cap_mb. With one bucket, accumulate over several micro-batches with "
    "no_sync."
)
_OUTSIDE = "Look at the collectives of your own code and at the broadcast of buffers: /trace shows them."


@dataclass(frozen=True)
class CommBoundFacts(Facts):
    """Means a step, and the link's figures; None where waiting or the transfers are not known.

    Attributes:
        kind: `bandwidth`, `latency`, `processor`, `launch` or `outside`; None if it is not known.
        not_known_because: Why the kind is not known; None if it is.
        exposed_share: Share of exposed communication in the steps' time, with waiting.
        exposed_ns: The same as time.
        steps_used: Number of steps.
        waiting_ns: Its part that is waiting for late ranks; None if waiting is not known.
        moving_ns: The rest; None if waiting is not known.
        steps_share_of_time: Share of the examined time that is in steps; None if waiting is not known.
        bytes_a_step: Sum of the collectives' sizes; None if the transfers are not known.
        messages_a_step: Number of collectives; None if the transfers are not known.
        message_bytes: Smallest, median and largest of them; None if the transfers are not known.
        bytes_per_s: Bytes a second while they moved; None if the transfers are not known.
        bus_bytes_per_s: Bytes a second that each rank sends in a ring; None if the transfers are not known.
        alpha_ns: Latency of one all-reduce; None if the transfers are not known.
        beta_bytes_per_s: Bytes a second without latency; None if the transfers are not known.
        replay_error_ratio: Relative error of the replayed exposed time; None if the transfers are not known.
        disturbed_share: Share of the transfers' time beyond their fastest tenth; None if the transfers are not known.
        processors: What the ranks lack, or why nothing is known to lack; None if the transfers are not known.
        exposed_by_collective_ns: Wait of training for the units' collectives, by kind; None without units.
    """

    kind: str | None
    not_known_because: str | None
    exposed_share: float
    exposed_ns: int
    steps_used: int
    waiting_ns: int | None = None
    moving_ns: int | None = None
    steps_share_of_time: float | None = None
    bytes_a_step: int | None = None
    messages_a_step: float | None = None
    message_bytes: list[int] | None = None
    bytes_per_s: int | None = None
    bus_bytes_per_s: int | None = None
    alpha_ns: int | None = None
    beta_bytes_per_s: int | None = None
    replay_error_ratio: float | None = None
    disturbed_share: float | None = None
    processors: dict[str, Any] | str | None = None
    exposed_by_collective_ns: dict[str, int] | None = None


FACTS = (CommBoundFacts,)


@dataclass(frozen=True)
class _Times:
    """Weighted means over the steps, in ns: exposed over all ranks, its part without waiting, and wall time."""

    exposed_ns: float
    moving_ns: float
    wall_ns: float

    @property
    def share(self) -> float:
        return self.moving_ns / self.wall_ns


def comm_bound(evidence: Evidence) -> Judgement:
    """Judge exposed communication without waiting above 30 % of the steps' time."""
    joined = evidence.joined
    if len(joined.ranks) < 2 and not evidence.absent_ranks:
        return []
    if evidence.stages:
        return [NotJudged("comm-bound", "the ranks of a pipeline wait for each other's messages: see /pipeline")]
    missing = [NotJudged("comm-bound", reason) for reason in _unsplit_reasons(evidence)]
    rows = np.arange(len(joined))
    if len(rows) < MIN_STEPS:
        reason = f"{len(rows)} of {MIN_STEPS} steps in which all ranks can be compared"
        return [NotJudged("comm-bound", reason), *missing]
    times = mean_times(evidence)
    if missing and times.exposed_ns / times.wall_ns > COMM_SHARE:
        return [_unsplit(evidence, times), *missing]
    return missing if missing or times.share <= COMM_SHARE else [_finding(evidence, times)]


def _unsplit_reasons(evidence: Evidence) -> list[str]:
    """Return why waiting cannot be separated from moving, at most one reason."""
    if evidence.separate_groups_reason:
        return [f"waiting cannot be separated from moving: {evidence.separate_groups_reason}"]
    if evidence.absent_ranks:
        return [f"waiting cannot be separated from moving without {format_ranks(evidence.absent_ranks)}"]
    return []


def mean_times(evidence: Evidence) -> _Times:
    """Return the steps' mean times.

    No step counts for more than a few median steps. With a fully sharded model, waiting is left out collective by
    collective.
    """
    joined = evidence.joined
    weights = step_weights(joined.window_ns)

    def mean(times_ns: Floats) -> float:
        return float(np.average(times_ns, weights=weights))

    within_ns = waiting_within_ns(evidence) if evidence.is_sharded else 0.0
    moving_ns = max(0.0, mean(moving(joined.exposed_ns)) - within_ns)
    return _Times(mean(joined.exposed_ns.mean(axis=1)), moving_ns, mean(joined.step_ns))


def _kind(evidence: Evidence, replay: Replay | str) -> CommKind:
    """Return the cause: the disturbance of the transfers, their bytes, or their number."""
    if isinstance(replay, str):
        return unknown_kind(replay)
    transfers, model = replay.transfers, replay.model
    exposed_ns = transfers.exposed_by_step_ns
    if float(np.median(exposed_ns)) < 0.5 * float(np.median(evidence.joined.exposed_ns.min(axis=1))):
        return CommKind("outside", "most of it is in other collectives than the gradients' all-reduces", _OUTSIDE)
    if (disturbed := disturbed_kind(evidence, exposed_ns)) is not None:
        return disturbed
    count = len(transfers) / transfers.steps
    if model.beta_ns * transfers.bytes_a_step >= model.alpha_ns * count:
        words = f"the bytes of {_bytes(transfers.bytes_a_step)} a step at {transfers.bytes_per_ns:.2g} GB/s"
        return CommKind("bandwidth", words, _COMPRESS, _predicted(evidence, Change(strategy="fp16")))
    words = f"the latency of {_buckets(count, transfers)}"
    return CommKind("latency", words, _MERGE, _predicted(evidence, Change(caps_mb=(_DEFAULT_CAP_MB,))))


def _predicted(evidence: Evidence, change: Change) -> Gain | None:
    fitted = fitted_steps(evidence)
    return None if isinstance(fitted, str) else gain_of(fitted, change)


def _finding(evidence: Evidence, times: _Times) -> Finding:
    if evidence.is_sharded:
        kind, facts = unit_kind(evidence, times.moving_ns), unit_facts(evidence)
    else:
        replay = replay_of(evidence)
        kind = _kind(evidence, replay)
        facts = {} if isinstance(replay, str) else _link_facts(evidence, replay)
    in_steps = steps_share(evidence)
    return Finding(
        code="comm-bound",
        severity=severity_of(kind.gain.ratio * in_steps) if kind.gain else "info",
        verdict=f"Moving data takes {percent(times.share)} of the steps' time",
        measure=_measure(times, facts.get("exposed_by_collective_ns")),
        when="" if in_steps > 0.5 else f"the steps are {percent(in_steps)} of the time examined",
        cause=kind.words,
        remedy=kind.remedy,
        steps=evidence.step_range,
        phase="exposed_comm",
        gain=kind.gain,
        evidence=CommBoundFacts(
            kind=None if kind.reason else kind.name,
            not_known_because=kind.reason or None,
            exposed_share=round(times.exposed_ns / times.wall_ns, 4),
            exposed_ns=round(times.exposed_ns),
            waiting_ns=round(times.exposed_ns - times.moving_ns),
            moving_ns=round(times.moving_ns),
            steps_share_of_time=round(in_steps, 4),
            steps_used=len(evidence.joined),
            **facts,
        ),
    )


def _measure(times: _Times, by_collective_ns: dict[str, int] | None) -> str:
    if by_collective_ns is None:
        return f"{duration(times.moving_ns)} a step that backward does not hide"
    parts = ", ".join(f"{collective_title(kind)} {duration(ns)}" for kind, ns in by_collective_ns.items())
    return f"{duration(times.moving_ns)} a step that computation does not hide; in the median step {parts}"


def _link_facts(evidence: Evidence, replay: Replay) -> dict[str, Any]:
    """Return sizes, bandwidth and latency of the transfers, and the error of their replay."""
    transfers, model = replay.transfers, replay.model
    measured_ns = float(np.median(transfers.exposed_by_step_ns))
    lack = shortage(evidence)
    ranks, rate = len(evidence.joined.ranks), transfers.bytes_per_ns
    return {
        "bytes_a_step": round(transfers.bytes_a_step),
        "messages_a_step": round(len(transfers) / transfers.steps, 1),
        "message_bytes": [int(size) for size in np.quantile(transfers.size_bytes, [0.0, 0.5, 1.0])],
        "bytes_per_s": round(rate * 1e9),
        "bus_bytes_per_s": round(rate * 1e9 * 2 * (ranks - 1) / ranks),
        "alpha_ns": round(model.alpha_ns) if model.is_separated or not model.beta_ns else None,
        "beta_bytes_per_s": round(1e9 / model.beta_ns) if model.is_separated and model.beta_ns else None,
        "replay_error_ratio": round(replay.error_ns / max(1.0, measured_ns), 4),
        "disturbed_share": round(disturbed_share(transfers.exposed_by_step_ns), 4),
        "processors": lack.facts if isinstance(lack, Shortage) else lack,
    }


def steps_share(evidence: Evidence) -> float:
    """Return the share of the examined time that is in steps; the rest is evaluation, checkpoints, and the like."""
    rank = int(evidence.joined.ranks[0])
    own = evidence.rank == rank
    start_ns, end_ns = evidence.steps.start_ns[own], evidence.steps.end_ns[own]
    span_ns = int(end_ns.max()) - int(start_ns.min())
    return min(1.0, int((end_ns - start_ns).sum()) / max(1, span_ns))


def _buckets(count: float, transfers: Transfers) -> str:
    typical = _bytes(float(np.median(transfers.size_bytes)))
    return f"{count:.0f} buckets of about {typical}" if count > 1 else f"one bucket of {typical}"


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _unsplit(evidence: Evidence, times: _Times) -> Finding:
    """Return a finding that claims neither waiting nor moving: waiting for an unseen rank looks like moving bytes."""
    if evidence.separate_groups_reason:
        remedy = "Look at each process group by itself: waits across groups are not recorded."
    else:
        absent = format_ranks(evidence.absent_ranks)
        remedy = f"Get the telemetry of {absent} first: waiting for a rank without telemetry looks like moving bytes."
    share = times.exposed_ns / times.wall_ns
    return Finding(
        code="comm-bound",
        severity="info",
        verdict=f"Exposed communication takes {percent(share)} of the steps' time",
        measure=f"{duration(times.exposed_ns)} a step, with waiting",
        cause="not known: whether ranks wait for a late rank cannot be seen",
        remedy=remedy,
        steps=evidence.step_range,
        phase="exposed_comm",
        evidence=CommBoundFacts(
            kind=None,
            not_known_because="whether ranks wait for a late rank cannot be seen",
            exposed_share=round(share, 4),
            exposed_ns=round(times.exposed_ns),
            steps_used=len(evidence.joined),
        ),
    )
