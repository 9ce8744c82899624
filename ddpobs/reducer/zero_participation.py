"""Participation without gradients: the collectives of a backward that this rank cannot compute.

| case | function | result |
|---|---|---|
| the rank is out of data, under `join` | `participate` | zeros in every bucket, no fault |
| an error interrupted the rank's backward | `abort` | zeros in the other buckets, the same error on every rank |

Every rank makes the same collective calls in the same order, or the other ranks wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from ddpobs.buckets import bucket as bucketing
from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import SkippedBucket
from ddpobs.errors import ReducerError
from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.reducer import Reducer


def participate(reducer: Reducer) -> None:
    """Take part in another rank's backward with zeros, call for call; also in a backward that is dropped.

    Raises:
        ReducerError: Another rank reported a fault, unless its backward was merely interrupted.
    """
    participation = reducer.readiness.participation
    reducer.faults.poll_flags()
    reducer.faults.start_backward()
    reducer.late.look()
    reducer.faults.record(reducer.late.report(static_graph=reducer.settings.static_graph, has_data=False))
    participation.take_part_without_data()
    late: list[Bucket] = []
    try:
        zeros = zero_buckets(reducer)
        if reports := _launch_rest(reducer, zeros):
            late = reducer.reduce_late(reports, zeros[-1], has_data=False)
        participation.resolve()
    except ReducerError as error:
        if not error.interrupted:
            raise
    finally:
        participation.forget()
        reducer.faults.forget()
        reducer.late.forget_saved()
    if reducer.recorder is not None:
        reducer.recorder.shadowed()
    if late:
        reducer.take_in(late)


def abort(reducer: Reducer) -> Iterator[None]:
    """End a backward that an error interrupted. Ranks that are still in it get an error too, and none hangs.

    The generator first launches the buckets that other ranks launch inside the backward. Resumed, it launches the
    buckets that they launch at its end. With several modules in one backward, all generators run to the first point
    before any is resumed.
    """
    readiness, participation = reducer.readiness, reducer.readiness.participation
    reducer.faults.fault = Fault(
        message="an error interrupted its backward, so that this one has no result on any rank. Drop the batch "
        "(zero_grad) on every rank, or stop",
        interrupted=True,
    )
    reduced = [bucket for bucket, _ in zip(reducer.buckets, reducer.pending, strict=False) if not bucket.sparse]
    try:
        participation.end(readiness.used, readiness.unseen())
        zeros = zero_buckets(reducer)
        if not (participation.defers_launch or reducer.settings.skip_unused):
            reducer.pending += [
                reducer.comm.launch(bucket, False) if participation.should_launch(bucket.members) else SkippedBucket()
                for bucket in zeros[len(reducer.pending) : -1]
            ]
        yield
        for pending in reducer.pending:
            with suppress(Exception):  # An error of an earlier bucket was raised at its wait already.
                pending.wait()
        reducer.pending = [SkippedBucket() for _ in reducer.pending]
        _launch_rest(reducer, zeros)
    except Exception:
        pass  # This rank's own error, the shared error that every rank raises, or an error that a hook raised before.
    finally:
        for bucket in reduced:  # The user's `zero_grad` may have run before the result arrived.
            bucket.buffer.zero_()
        reducer.end()


def zero_buckets(reducer: Reducer) -> list[Bucket]:
    """The reducer's buckets in launch order, with zeros in them."""
    return [bucketing.zeros_like(bucket) for bucket in reducer.buckets]


def _launch_rest(reducer: Reducer, zeros: Sequence[Bucket]) -> list[Fault]:
    """Launch zeros for the buckets that are not launched yet, and wait for all. Returns as `raise_shared_fault`."""
    participation, last = reducer.readiness.participation, zeros[-1]
    if reducer.faults.fault is not None and reducer.carries_faults:
        reducer.late.save(last)
        reducer.faults.poison(last.buffer)
    reducer.faults.publish()
    if reducer.settings.skip_unused:
        participation.start_map_reduce()
    launched = [bucket for bucket in zeros[len(reducer.pending) :] if participation.should_launch(bucket.members)]
    pending = [*reducer.pending, *(reducer.comm.launch(bucket, bucket is last) for bucket in launched)]
    participation.start_map_reduce()
    for communication in pending:
        communication.wait()
    return reducer.raise_shared_fault(last)
