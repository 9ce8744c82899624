"""How a string names a strategy: its name, its class, and the number that may follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpobs.comm.base import BucketComm


@dataclass(frozen=True)
class Argument:
    """The number that may follow a strategy's name after a colon, as in `topk:0.01`.

    Attributes:
        name: The class's keyword argument.
        convert: Converts the text; raises ValueError for other text.
        is_valid: Whether the class accepts the number.
        limits: The valid numbers, in the words of the error message.
    """

    name: str
    convert: Callable[[str], Any]
    is_valid: Callable[[Any], bool]
    limits: str


@dataclass(frozen=True)
class Strategy:
    """A strategy that a string names.

    Attributes:
        name: The string, without an argument.
        factory: The class.
        argument: The number that may follow the name; the class has a default for it.
    """

    name: str
    factory: type[BucketComm]
    argument: Argument | None = None
