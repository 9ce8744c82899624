"""What is done with a full bucket: one small interface, and the ways behind it."""

from __future__ import annotations

from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.base import BucketComm, CommFactory, FuturePending, Pending, SkippedBucket
from ddpobs.comm.cast import Bf16, Fp16
from ddpobs.comm.int8 import Int8
from ddpobs.comm.parameter_server import ParameterServer
from ddpobs.comm.powersgd import PowerSGD
from ddpobs.comm.registry import choose, name_of
from ddpobs.comm.round_robin import RoundRobin
from ddpobs.comm.topk import TopK
from ddpobs.comm.user_hook import CommHook, GradBucket

__all__ = [
    "AllReduce",
    "Bf16",
    "BucketComm",
    "CommFactory",
    "CommHook",
    "Fp16",
    "FuturePending",
    "GradBucket",
    "Int8",
    "ParameterServer",
    "Pending",
    "PowerSGD",
    "RoundRobin",
    "SkippedBucket",
    "TopK",
    "choose",
    "name_of",
]
