"""A parameter that two modules reduce in one backward: a shared layer, or a DDP module inside another one.

When the second module's backward starts, the first module's is in progress. Both need the gradient as autograd made
it, so that neither may make `.grad` a view of its bucket: each reduces a copy, and writes its result into `.grad` at
its end. The outcome depends on the first module's progress:

| bucket in the first module | parameter's gradient there | result |
|---|---|---|
| not launched | not arrived | both reduce a copy |
| not launched | arrived, still autograd's tensor | both reduce a copy |
| not launched | copied in on arrival, so that `.grad` is a divided view | fault on every rank |
| launched | not arrived: it takes no part | the second module reduces a copy |
| launched | arrived | fault on every rank |
| sparse | any | fault on every rank |

A fault needs a sparse gradient, or outputs in which no tensor is found: only then a module's backward starts late.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddpobs.buckets.bucket import Bucket
from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.reducer import Reducer


def share(reducer: Reducer, open_reducers: Iterable[Reducer]) -> None:
    """Prepare for a backward while the `open_reducers` have one in progress. Records a fault if it is too late."""
    layout = reducer.layout
    for other in open_reducers:
        for parameter in layout.index_of.keys() & other.layout.index_of.keys():
            index = layout.index_of[parameter]
            if not _release(other, other.layout.index_of[parameter]):
                reducer.faults.record(
                    Fault(
                        message=f"two DistributedDataParallel modules reduce parameter {layout.names[index]} in one "
                        "backward, and its gradient is sparse, or one of them returns outputs in which no "
                        "tensor is found: wrap both modules in one"
                    )
                )
            layout.bucket_of[index].keep_grads_separate()


def _release(reducer: Reducer, index: int) -> bool:
    """Leave a parameter's gradient to another module too; False if it is too late."""
    layout = reducer.layout
    bucket = layout.bucket_of[index]
    launched = bucket.index < len(reducer.pending)
    if not launched:
        bucket.keep_grads_separate()
    copied = bucket.copied[layout.index_in_bucket[index]]
    return not bucket.sparse and not (reducer.readiness.used[index] and (launched or copied))


def write_back(reducer: Reducer, open_reducers: Iterable[Reducer]) -> None:
    """Write a module's results into `.grad`, after the other modules have copied the gradients that are there."""
    shared = [bucket for bucket in reducer.buckets if _is_shared(bucket)]
    if shared:
        for other in open_reducers:
            _copy_in(other)
    for bucket in shared:
        bucket.write_back(bucket.buffer, reducer.unused.stashed)


def _copy_in(reducer: Reducer) -> None:
    for bucket in reducer.buckets[len(reducer.pending) :]:
        if _is_shared(bucket):
            bucket.fill(reducer.readiness.used)
            bucket.copied[:] = b"\1" * len(bucket.copied)


def _is_shared(bucket: Bucket) -> bool:
    return not (bucket.grads_are_views or bucket.casts)
