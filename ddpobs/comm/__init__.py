"""What is done with a full bucket: one small interface, and the ways behind it."""

from __future__ import annotations

from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.base import BucketComm, Nothing, OnFuture, Pending, Way
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
    "CommHook",
    "Fp16",
    "GradBucket",
    "Int8",
    "Nothing",
    "OnFuture",
    "ParameterServer",
    "Pending",
    "PowerSGD",
    "RoundRobin",
    "TopK",
    "Way",
    "choose",
    "name_of",
]
