"""The strategies by name, and the choice among them by the arguments of `DistributedDataParallel`.

A new strategy is one file in `comm/strategies/`; no other file changes. It declares `STRATEGIES`: the names, each with
its class, and the number that may follow the name. `docs/communication.md` describes it: a test fails without a row.
The tests in `tests/comm/` train with every registered strategy. Its class is in `ddpobs.comm` by its own name.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pkgutil import iter_modules

from ddpobs.comm import strategies
from ddpobs.comm.base import CommFactory
from ddpobs.comm.round_robin import RoundRobin
from ddpobs.comm.strategies.all_reduce import AllReduce
from ddpobs.comm.strategy import Strategy
from ddpobs.errors import ConfigError

STRATEGIES: tuple[Strategy, ...] = tuple(
    strategy
    for module in iter_modules(strategies.__path__)
    for strategy in import_module(f"{strategies.__name__}.{module.name}").STRATEGIES
)
"""All strategies, file by file."""
_BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}
_WITH_ARGUMENT = [
    f"{strategy.name}:{strategy.argument.name.upper()} ({strategy.argument.limits})"
    for strategy in STRATEGIES
    if strategy.argument is not None
]
_EXPECTED = (
    f"one of {', '.join((*_BY_NAME, *_WITH_ARGUMENT))}, "
    "or a callable that takes the process group and returns a BucketComm"
)


def choose(comm: str | CommFactory | None, round_robin_groups: int) -> CommFactory:
    """Return the factory for the arguments `comm` and `round_robin_groups` of `DistributedDataParallel`.

    Raises:
        ConfigError: `comm` names no strategy and is not callable, or the number of groups is no whole number above 0.
    """
    if not isinstance(round_robin_groups, int) or round_robin_groups < 1:
        raise ConfigError("round_robin_groups", "a whole number of process groups, at least 1", round_robin_groups)
    factory = AllReduce if comm is None else comm
    if isinstance(factory, str):
        factory = _parse(factory)
    if not callable(factory):
        raise ConfigError("comm", _EXPECTED, comm)
    return factory if round_robin_groups == 1 else partial(RoundRobin, factory=factory, groups=round_robin_groups)


def name_of(comm: object) -> str:
    """Name the choice, to compare it between ranks: a string as it is, a user's factory by its class or function.

    A `functools.partial` has the arguments that are numbers or strings, too.
    """
    if comm is None:
        return "all_reduce"
    if isinstance(comm, partial):
        values = [_name_of_argument(value) for value in comm.args]
        values += [f"{name}={_name_of_argument(value)}" for name, value in sorted(comm.keywords.items())]
        return f"{name_of(comm.func)}({', '.join(values)})"
    return comm if isinstance(comm, str) else str(getattr(comm, "__qualname__", type(comm).__qualname__))


def _name_of_argument(value: object) -> str:
    return repr(value) if isinstance(value, (str, int, float)) else name_of(value)


def _parse(text: str) -> CommFactory:
    name, colon, number = text.partition(":")
    strategy = _BY_NAME.get(name)
    if strategy is None or (colon and strategy.argument is None):
        raise ConfigError("comm", _EXPECTED, text)
    if not colon or strategy.argument is None:
        return strategy.factory
    try:
        value = strategy.argument.convert(number)
    except ValueError:
        raise ConfigError("comm", _EXPECTED, text) from None
    if not strategy.argument.is_valid(value):
        raise ConfigError("comm", _EXPECTED, text)
    return partial(strategy.factory, **{strategy.argument.name: value})
