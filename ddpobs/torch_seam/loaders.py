"""Private state of torch's loader iterators: the worker whose batch comes next, and the function that collates."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

_MIN_AHEAD = 2
"""Minimum number of batches ahead of a worker, without which the others cannot show that they are faster."""
_ALONE_SHARE = 0.75


def awaited_worker(batches: object) -> int | None:
    """Return the worker whose batch comes next, if it has not come yet; None without one, or if any batch may come."""
    if not isinstance(batches, _MultiProcessingDataLoaderIter):
        return None
    try:
        task = batches._task_info.get(batches._rcvd_idx)
        return int(task[0]) if batches._in_order and task is not None and len(task) == 1 else None
    except Exception:  # Another version of torch.
        return None


def is_alone(batches: Any, worker: int) -> bool:
    """Whether most batches of the other workers had come when this worker's came, so that it alone held them up.

    Workers that are equally fast have then just begun their next batches.
    """
    try:
        other_tasks = [task for task in batches._task_info.values() if task[0] != worker]
        arrived = sum(len(task) > 1 for task in other_tasks)
        return (
            batches._prefetch_factor >= _MIN_AHEAD and bool(other_tasks) and arrived >= _ALONE_SHARE * len(other_tasks)
        )
    except Exception:
        return False


def time_collate(batches: object, report: Callable[[int], object]) -> None:
    """Report the time of each later call of `collate_fn`, in nanoseconds, if no worker process calls it."""
    if not isinstance(batches, _SingleProcessDataLoaderIter):
        return
    fetcher = getattr(batches, "_dataset_fetcher", None)
    original = getattr(fetcher, "collate_fn", None)
    if not callable(original) or hasattr(original, "_ddpobs_times"):
        return

    def collate(samples: Any) -> Any:
        began = monotonic_ns()
        batch = original(samples)
        report(monotonic_ns() - began)
        return batch

    collate._ddpobs_times = True  # type: ignore[attr-defined]
    fetcher.collate_fn = collate  # type: ignore[union-attr]
