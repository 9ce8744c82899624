"""Events of a Kineto trace, decoded by their category. Of categories that are not read, no value becomes an object."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Annotated, Any, Literal

import msgspec

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Microseconds = Annotated[float, msgspec.Meta(ge=-4e15, le=4e15)]
"""In nanoseconds, 64 bits hold it."""
_MAX_SKIPPED = 64
"""Maximum number of categories that are skipped fast."""


class Correlation(msgspec.Struct, frozen=True, gc=False):
    """What joins a kernel with the call that launched it."""

    correlation: _Int64 = 0


class Collective(Correlation, frozen=True, gc=False):
    """Arguments of a kernel of NCCL."""

    collective: str = msgspec.field(default="", name="Collective name")
    elements: int = msgspec.field(default=0, name="In msg nelems")
    gathered: int = msgspec.field(default=0, name="Out msg nelems")
    dtype: str = ""
    group: str = msgspec.field(default="", name="Process Group Name")
    ranks: str | list[int] = msgspec.field(default="", name="Process Group Ranks")


_UNCORRELATED, _UNKNOWN = Correlation(), Collective()


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What lasted some time, in microseconds."""

    ph: Literal["X"] = "X"
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0


class Annotation(Event, frozen=True, gc=False, tag_field="cat", tag="user_annotation"):
    """A range that training or torch named."""

    name: str = ""


class Operator(Event, frozen=True, gc=False, tag_field="cat", tag="cpu_op"):
    """An operator on the host."""

    name: str = ""


class Kernel(Event, frozen=True, gc=False, tag_field="cat", tag="kernel"):
    """A kernel of a GPU."""

    name: str = ""
    args: Collective = _UNKNOWN


class Copy(Event, frozen=True, gc=False, tag_field="cat", tag="gpu_memcpy"):
    """A copy on a GPU."""

    args: Correlation = _UNCORRELATED


class Fill(Event, frozen=True, gc=False, tag_field="cat", tag="gpu_memset"):
    """Memory of a GPU that is set."""

    args: Correlation = _UNCORRELATED


class Launch(Event, frozen=True, gc=False, tag_field="cat", tag="cuda_runtime"):
    """A call that launches work of a GPU."""

    args: Correlation = _UNCORRELATED


class DriverLaunch(Event, frozen=True, gc=False, tag_field="cat", tag="cuda_driver"):
    """A call of the driver that launches work of a GPU."""

    args: Correlation = _UNCORRELATED


_READ = (Annotation, Operator, Kernel, Copy, Fill, Launch, DriverLaunch)
_CATEGORIES = {kind.__struct_config__.tag for kind in _READ}
_SKIPPED = ("ac2g", "async_cpu_to_gpu", "cpu_instant_event", "fwdbwd", "gpu_user_annotation", "python_function")
"""Frequent ones. Others are noted as they come."""


class _Kind(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""


class Decoder:
    """Decodes lists of events; those that are not read are left out, or have another type than the `Event`s here."""

    def __init__(self) -> None:
        self._skipped = [*_SKIPPED]
        self._fast = self._decoder()
        self._kinds: Any = msgspec.json.Decoder(list[_Kind])
        self._raws: Any = msgspec.json.Decoder(list[msgspec.Raw])
        self._one: Any = msgspec.json.Decoder(_union(_READ))

    def decode(self, text: bytes) -> list[Event]:
        """Decode a list of events.

        Raises:
            msgspec.DecodeError: It is no list of events of JSON.
        """
        try:
            return self._fast.decode(text)  # type: ignore[no-any-return]
        except msgspec.ValidationError:  # Not all have a category, and not all categories are known.
            return self._one_by_one(text)

    def _one_by_one(self, text: bytes) -> list[Event]:
        kinds = self._kinds.decode(text)
        categories = dict.fromkeys(kind.cat for kind in kinds)
        if new := [name for name in categories if name and name not in _CATEGORIES and name not in self._skipped]:
            self._skipped = [*self._skipped, *new][:_MAX_SKIPPED]
            self._fast = self._decoder()
        read = zip(kinds, self._raws.decode(text), strict=True)
        return [self._one.decode(raw) for kind, raw in read if kind.ph == "X" and kind.cat in _CATEGORIES]

    def _decoder(self) -> Any:
        skipped = [
            msgspec.defstruct(f"Skipped{index}", [], tag_field="cat", tag=name, gc=False)
            for index, name in enumerate(self._skipped)
        ]
        return msgspec.json.Decoder(GenericAlias(list, _union([*_READ, *skipped])))


def _union(kinds: Iterable[Any]) -> Any:
    return reduce(or_, kinds)
