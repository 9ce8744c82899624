"""Communication strategies: the exchange that reduces a full bucket over the ranks."""

from __future__ import annotations

from typing import Any

from ddpobs.comm.base import BucketComm, CommFactory, FuturePending, Pending, SkippedBucket
from ddpobs.comm.dense_only import DenseOnly
from ddpobs.comm.registry import STRATEGIES, choose, name_of
from ddpobs.comm.round_robin import RoundRobin
from ddpobs.comm.strategies.all_reduce import AllReduce
from ddpobs.comm.user_hook import CommHook, GradBucket

_classes = {strategy.factory.__name__: strategy.factory for strategy in STRATEGIES}

__all__ = [  # noqa: PLE0604 - the names of the strategies' classes
    "AllReduce",
    "BucketComm",
    "CommFactory",
    "CommHook",
    "DenseOnly",
    "FuturePending",
    "GradBucket",
    "Pending",
    "RoundRobin",
    "SkippedBucket",
    "choose",
    "name_of",
    *(name for name in _classes if name != "AllReduce"),
]


def __getattr__(name: str) -> Any:
    """Return the class of a registered strategy."""
    if name in _classes:
        return _classes[name]
    raise AttributeError(f"module 'ddpobs.comm' has no attribute {name!r}")
