"""The what-if model of a run, fitted to its latest steps: stored columns become `ddpobs.whatif.Observed`."""

from __future__ import annotations

import numpy as np

from ddpobs import wire
from ddpobs.whatif.fit import Observed, fit
from ddpobs.whatif.model import Fitted
from ddpobs.wire.facts import SettingFacts, read_facts
from ddpobs_server.analysis.communication.arrivals import arrivals
from ddpobs_server.analysis.communication.transfers import Transfers, latest_transfers
from ddpobs_server.analysis.evidence import ColumnReader, ColumnsTooLargeError, Evidence
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

_UNUSED_MAP = 1
"""The map of unused parameters among the kinds of `wire.Comms`."""


COMPILED_BUCKETS = (
    "bucket_cap_mb does not apply: torch's compiler merges the all-reduces (optimize_ddp is python_reducer). Their "
    "size is torch._inductor.config._fuse_ddp_bucket_size, in MB"
)
_NOT_MODELLED = {
    "units": "the prediction is of DDP's buckets, and this model has none",
    "stages": "the ranks of a pipeline wait for each other's messages: see /pipeline",
}


def fitted_steps(evidence: Evidence) -> Fitted | str:
    """Return the model of the latest steps, or why there is none."""
    if "fitted" not in evidence.shared:
        evidence.shared["fitted"] = COMPILED_BUCKETS if has_compiled_buckets(evidence) else _fitted(evidence)
    result: Fitted | str = evidence.shared["fitted"]
    return result


def has_compiled_buckets(evidence: Evidence) -> bool:
    """Whether torch's compiler merges the all-reduces, in place of the reducer's buckets."""
    return read_facts(evidence.settings, SettingFacts).compiled_buckets


def _fitted(evidence: Evidence) -> Fitted | str:
    columns = evidence.columns
    if evidence.is_sharded or evidence.stages:
        return _NOT_MODELLED["units" if evidence.is_sharded else "stages"]
    if evidence.separate_groups_reason:
        return evidence.separate_groups_reason
    if evidence.absence_reasons:
        return evidence.absence_reasons[0]
    if columns is None or not columns.layouts():
        return "no layout of buckets is recorded"
    try:
        transfers = latest_transfers(evidence, columns)
    except ColumnsTooLargeError as error:
        return str(error)
    observed = _observed(evidence, columns, transfers)
    return observed if isinstance(observed, str) else fit(observed)


def _observed(evidence: Evidence, columns: ColumnReader, transfers: Transfers) -> Observed | str:
    if not len(transfers):
        return "no step in which the ranks can be compared has bucket spans of all of them"
    if len(np.unique(transfers.module)) > 1:
        return "the run has several DDP modules, whose buckets share the link: not replayed"
    matrix = transfers.rows_of_steps
    joined, steps = _joined_with(evidence.joined, transfers.step[matrix[:, 0]])
    matrix = matrix[steps]
    parameters = arrivals(evidence, columns)
    if parameters is not None and int(parameters.bucket.max()) + 1 != matrix.shape[1]:
        parameters = None
    optimizer = evidence.joined.phases_ns[joined, :, wire.OWN_PHASES.index("optimizer")]
    return Observed(
        step_ns=evidence.joined.step_ns[joined],
        ready_ns=transfers.ready_ns[matrix],
        moving_ns=transfers.moving_ns[matrix],
        done_ns=transfers.done_ns[matrix],
        bucket_bytes=transfers.size_bytes[matrix[0]].astype(np.float64),
        exposed_ns=transfers.exposed_ns[matrix[:, 0]],
        world_size=max(evidence.world_size, len(evidence.joined.ranks)),
        arrival_ns=None if parameters is None else parameters.ready_ns,
        parameter_bytes=None if parameters is None else parameters.sizes,
        parameter_bucket=None if parameters is None else parameters.bucket,
        run_delay_ns=_mean_of_ranks(evidence.steps.run_delay_ns, evidence, joined),
        running_ns=_mean_of_ranks(evidence.steps.running_ns, evidence, joined),
        strategy=max(columns.layouts(), key=lambda layout: layout.revision).comm,
        batches=max(1, round(float(np.median(evidence.steps.micro_steps)))),
        optimizer_ns=max(0.0, float(np.median(optimizer))),
        find_unused_ns=_find_unused_ns(evidence, columns, transfers, matrix),
        on_processor=any(hello.device == "cpu" for hello in evidence.hellos.values()),
        own_ns=evidence.joined.phases_ns[joined],
        phases=wire.OWN_PHASES,
    )


def _joined_with(joined: JoinedSteps, step: wire.Ints) -> tuple[wire.Ints, wire.Ints]:
    """Return the indices in `joined` of these steps, and the indices of the steps that are there."""
    _, of_joined, of_step = np.intersect1d(joined.step, step, return_indices=True)
    return of_joined, of_step


def _mean_of_ranks(times_ns: wire.Ints, evidence: Evidence, joined: wire.Ints) -> Floats | None:
    """Return a time of each step, the mean over the ranks; None unless all report it."""
    of_ranks = times_ns[evidence.joined.row[joined]]
    return of_ranks.mean(axis=1) if len(joined) and (of_ranks >= 0).all() else None


def _find_unused_ns(evidence: Evidence, columns: ColumnReader, transfers: Transfers, matrix: wire.Ints) -> float | None:
    """Return the median time of the map of unused parameters after the last bucket, on the first rank."""
    if not evidence.settings.get("find_unused_parameters") or not len(matrix):
        return None
    rank, steps = int(evidence.joined.ranks[0]), transfers.step[matrix[:, 0]]
    span = int(steps.min()), int(steps.max())
    try:
        comms, spans = columns.comms(rank, *span), columns.spans([rank], *span)[1]
    except ColumnsTooLargeError:
        return None
    comms = comms.select(comms.kind == _UNUSED_MAP)
    last_done = {int(step): int(done) for step, done in sorted(zip(spans.step, spans.done_ns, strict=True))}
    times = [
        done - max(launched, last_done.get(int(step), launched))
        for step, launched, done in zip(comms.step, comms.launched_ns, comms.done_ns, strict=True)
    ]
    return float(np.median(np.maximum(times, 0))) if times else None
