"""A user's choice of what is done with a full bucket, as a string or as a way of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.base import CommFactory
from ddpobs.comm.cast import Bf16, Fp16
from ddpobs.comm.int8 import Int8
from ddpobs.comm.parameter_server import ParameterServer
from ddpobs.comm.powersgd import PowerSGD
from ddpobs.comm.round_robin import RoundRobin
from ddpobs.comm.topk import TopK
from ddpobs.errors import ConfigError

_PLAIN: dict[str, CommFactory] = {
    "all_reduce": AllReduce,
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": Int8,
    "parameter_server": ParameterServer,
    "powersgd": PowerSGD,
    "topk": TopK,
}
_WITH_NUMBER: dict[str, tuple[CommFactory, str, Callable[[str], Any], Callable[[Any], bool]]] = {
    "topk": (TopK, "density", float, lambda density: 0 < density <= 1),
    "powersgd": (PowerSGD, "rank", int, lambda rank: rank >= 1),
}
_EXPECTED = (
    f"one of {', '.join(_PLAIN)}, topk:DENSITY (above 0, at most 1), powersgd:RANK (at least 1), "
    "or a callable that takes the process group and gives a BucketComm"
)


def choose(comm: str | CommFactory | None, round_robin_groups: int) -> CommFactory:
    """The way that the arguments of `DistributedDataParallel` name.

    Raises:
        ConfigError: There is no such way.
    """
    if not isinstance(round_robin_groups, int) or round_robin_groups < 1:
        raise ConfigError("round_robin_groups", "a whole number of process groups, at least 1", round_robin_groups)
    way = AllReduce if comm is None else comm
    if isinstance(way, str):
        way = _named(way)
    if not callable(way):
        raise ConfigError("comm", _EXPECTED, comm)
    return way if round_robin_groups == 1 else partial(RoundRobin, way=way, groups=round_robin_groups)


def name_of(way: object) -> str:
    """What the ranks' choices are compared by: a string as it is, what is the user's own by its class or function."""
    if way is None:
        return "all_reduce"
    return way if isinstance(way, str) else str(getattr(way, "__qualname__", type(way).__qualname__))


def _named(text: str) -> CommFactory:
    name, colon, number = text.partition(":")
    if not colon and name in _PLAIN:
        return _PLAIN[name]
    if name not in _WITH_NUMBER:
        raise ConfigError("comm", _EXPECTED, text)
    way, argument, convert, holds = _WITH_NUMBER[name]
    try:
        value = convert(number)
    except ValueError:
        raise ConfigError("comm", _EXPECTED, text) from None
    if not holds(value):
        raise ConfigError("comm", _EXPECTED, text)
    return partial(way, **{argument: value})
