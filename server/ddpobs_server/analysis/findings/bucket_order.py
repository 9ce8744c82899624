"""Finding `bucket-order`: gradients arrive in another order than the buckets, which are launched strictly in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs.shared.words import format_bucket
from ddpobs_server.analysis.communication.arrivals import arrivals
from ddpobs_server.analysis.communication.predicted_gain import exposes_communication
from ddpobs_server.analysis.communication.step_replay import Replay, replay_of
from ddpobs_server.analysis.evidence import MAX_LISTED, ColumnReader, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, severity_of
from ddpobs_server.analysis.steps.joined_steps import Floats

CODES = ("bucket-order",)
_REMEDY = "Register the modules in the order in which forward uses them."
_NOT_REBUILT = (
    " With find_unused_parameters=True buckets keep the order of registration: switch it off if no parameter is "
    "unused, or pass static_graph=True if the graph never changes."
)


@dataclass(frozen=True)
class BucketOrderFacts(Facts):
    """Readiness of the buckets in a typical step.

    Attributes:
        ready_ns: Readiness of each bucket since the step's first, in launch order.
        blocked_ns: Time that each bucket waits for those before it.
        exposed_ns: Replayed exposed communication of a step.
        find_unused_parameters: Whether the flag is on.
        replay_error_ns: Error of the replay.
    """

    ready_ns: list[int]
    blocked_ns: list[int]
    exposed_ns: int
    find_unused_parameters: bool
    replay_error_ns: int


FACTS = (BucketOrderFacts,)


def bucket_order(evidence: Evidence) -> Judgement:
    """Judge the time that a step would save if its buckets were filled in the order of the gradients' arrival."""
    if not exposes_communication(evidence):
        return []
    replay = replay_of(evidence)
    if evidence.columns is None or not evidence.columns.layouts():
        return []
    if isinstance(replay, str):
        return [NotJudged("bucket-order", replay)]
    if len(np.unique(replay.transfers.module)) > 1 or len(replay.sizes) < 2:
        return []
    late = late_buckets(replay.ready_ns)
    saving = _gain(evidence, evidence.columns, replay) if len(late) else None
    return [] if saving is None else [_finding(evidence, evidence.columns, replay, late, saving)]


def late_buckets(ready_ns: Floats) -> wire.Ints:
    """Return the positions of the buckets that are ready after a later bucket is."""
    earliest_after = np.minimum.accumulate(ready_ns[::-1])[::-1]
    return np.flatnonzero(ready_ns[:-1] > earliest_after[1:])


def _gain(evidence: Evidence, columns: ColumnReader, replay: Replay) -> Gain | None:
    """Return the gain of the same buckets in the order of their readiness, or of new ones, whichever is larger.

    New buckets hold the parameters in the order of their arrival, if it was sampled.
    """
    order = np.argsort(replay.ready_ns, kind="stable")
    options = [replay.gain(replay.ready_ns[order], replay.sizes[order])]
    parameters = arrivals(evidence, columns)
    if parameters is not None:
        largest, first = float(replay.sizes.max()), float(replay.sizes[0])
        options.append(replay.gain(*parameters.in_order().buckets(largest, first)))
    return max((gain for gain in options if gain), key=lambda gain: gain.step_ns, default=None)


def _finding(evidence: Evidence, columns: ColumnReader, replay: Replay, late: wire.Ints, saving: Gain) -> Finding:
    buckets = launch_order(replay)[late]
    layout = max(columns.layouts(), key=lambda one: one.revision)
    names = [parameter.name for bucket in buckets.tolist() for parameter in layout.buckets[bucket].parameters]
    blocked_ns = np.maximum.accumulate(replay.ready_ns) - replay.ready_ns
    worst = int(launch_order(replay)[late[np.argmax(replay.ready_ns[late])]])
    is_flagged = bool(evidence.settings.get("find_unused_parameters"))
    return Finding(
        code="bucket-order",
        severity=severity_of(saving.ratio),
        verdict="Gradients arrive in another order than their buckets",
        measure=f"{np.count_nonzero(blocked_ns)} of {len(layout.buckets)} buckets wait for an earlier one",
        cause="find_unused_parameters=True keeps buckets in the order of registration"
        if is_flagged
        else "not known: the order of registration is not recorded",
        where=format_bucket(layout.module, worst, layout.buckets[worst]),
        remedy=_REMEDY + (_NOT_REBUILT if is_flagged else ""),
        steps=evidence.step_range,
        phase="exposed_comm",
        buckets=buckets.tolist(),
        parameters=names[:MAX_LISTED],
        gain=saving,
        evidence=BucketOrderFacts(
            ready_ns=[round(ns) for ns in replay.ready_ns.tolist()],
            blocked_ns=[round(ns) for ns in blocked_ns.tolist()],
            exposed_ns=round(replay.now_ns),
            find_unused_parameters=is_flagged,
            replay_error_ns=round(replay.error_ns),
        ),
    )


def launch_order(replay: Replay) -> wire.Ints:
    """Return the bucket at each position of the typical step."""
    return np.unique(replay.transfers.bucket)
