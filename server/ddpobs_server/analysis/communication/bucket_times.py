"""Mean times of each bucket: its computation, the wait for the last rank, and the movement of its bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.communication.link_model import fit_transfers
from ddpobs_server.analysis.communication.transfers import Transfers
from ddpobs_server.analysis.steps.joined_steps import Floats
from ddpobs_server.analysis.steps.step_timeline import BucketSpans


@dataclass(frozen=True)
class BucketTimes:
    """Means over the ranks and some steps, by module and bucket of the latest layout; shape [buckets].

    Attributes:
        first: First step of these.
        last: Last step.
        module: The DDP module.
        revision: Its layout.
        bucket: The bucket.
        compute_ns: From the readiness of the bucket before it to its own.
        wait_ns: From the begin of its all-reduce to the arrival of the last rank.
        move_ns: From there to the completion.
        size_bytes: Its size; 0 if it is not known.
        fitted_ns: Time to move its bytes at the latency and bandwidth that fit all buckets; 0 if it is not known.
    """

    first: int
    last: int
    module: wire.Ints
    revision: wire.Ints
    bucket: wire.Ints
    compute_ns: Floats
    wait_ns: Floats
    move_ns: Floats
    size_bytes: wire.Ints
    fitted_ns: Floats

    def __len__(self) -> int:
        return len(self.bucket)


def bucket_times(
    step: wire.Ints, spans: BucketSpans, sizes: dict[tuple[int, int, int], int], transfers: Transfers
) -> BucketTimes:
    """Return the times of each bucket of the latest layouts.

    Args:
        step: Step of each span, at least one; shape [rows].
        spans: Spans of all ranks, shape [rows].
        sizes: Bytes by module, revision and bucket.
        transfers: Transfers of the same steps, to fit the link.
    """
    newest = np.full(int(spans.module.max()) + 1, -1)
    np.maximum.at(newest, spans.module, spans.revision)
    rows = np.flatnonzero(spans.revision == newest[spans.module])
    keys = np.stack([spans.module, spans.revision, spans.bucket])[:, rows]
    (module, revision, bucket), index = np.unique(keys, axis=1, return_inverse=True)
    index = index.reshape(-1)
    counts = np.bincount(index)

    def mean(begin_ns: wire.Ints, end_ns: wire.Ints) -> Floats:
        return np.asarray(np.bincount(index, (end_ns - begin_ns)[rows]) / counts)

    identity = zip(module.tolist(), revision.tolist(), bucket.tolist(), strict=True)
    size = np.array([sizes.get(key, 0) for key in identity], np.int64)
    fitted_ns = np.zeros(len(bucket))
    if len(transfers):
        fitted_ns = np.where(size > 0, fit_transfers(transfers).time_ns(size.astype(np.float64)), 0.0)
    return BucketTimes(
        first=int(step.min()),
        last=int(step.max()),
        module=module,
        revision=revision,
        bucket=bucket,
        compute_ns=mean(spans.computing_ns, spans.ready_ns),
        wait_ns=mean(spans.begun_ns, spans.moving_ns),
        move_ns=mean(spans.moving_ns, spans.done_ns),
        size_bytes=size,
        fitted_ns=fitted_ns,
    )
