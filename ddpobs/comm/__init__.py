"""What is done with a full bucket: one small interface, and the ways behind it."""

from __future__ import annotations

from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.face import BucketComm, Pending
from ddpobs.comm.hook import CommHook, GradBucket

__all__ = ["AllReduce", "BucketComm", "CommHook", "GradBucket", "Pending"]
