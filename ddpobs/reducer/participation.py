"""Participation policies: which parameters take part in a backward.

| policy | setting | a parameter without a gradient | file |
|---|---|---|---|
| `AllRequired` | the default | is a fault | here |
| `MissingAsZero` | Horovod's optimizer | counts as zero | here |
| `FindUnused` | `find_unused_parameters` | is compared between the ranks | `find_unused.py` |
| `StaticGraph` | `static_graph` | must be missing in every backward | `static_graph.py` |
| `DroppedLayers` | a `LayerDrop` in the module | is a fault unless the step drops its layer | `dropped_layers.py` |

A reducer has one policy. It calls `begin`, `end`, `start_map_reduce`, `resolve` and `forget` once in each synchronised
backward, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch.autograd.graph import Node
from typing_extensions import override

from ddpobs.buckets.layout import Layout
from ddpobs.reducer.dropped_layers import DroppedLayers
from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.find_unused import FindUnused
from ddpobs.reducer.settings import Settings
from ddpobs.reducer.static_graph import StaticGraph
from ddpobs.reducer.used_map import UsedMap
from ddpobs.torch_seam import autograd


class Participation(Protocol):
    """The interface of a policy."""

    @property
    def defers_launch(self) -> bool:
        """Whether no bucket may be launched before the end of this backward."""
        ...

    @property
    def is_first_backward(self) -> bool:
        """Whether this backward decides how the next ones run, so that every rank must learn whether it succeeded."""
        ...

    def begin(self, used: bytearray) -> Sequence[int]:
        """Indices of the parameters that will get no gradient.

        Args:
            used: By parameter, whether it got a gradient in earlier passes under `no_sync`.
        """
        ...

    def take_part_without_data(self) -> None:
        """Prepare to take part in another rank's backward, in which this rank has no gradients."""
        ...

    def end(self, used: bytearray, missing: Sequence[int]) -> Fault | None:
        """The fault of a backward that is over, if there is one.

        Args:
            used: By parameter, whether it got a gradient since the last synchronised backward.
            missing: Indices of the parameters that were expected and got no gradient.
        """
        ...

    def start_map_reduce(self) -> None:
        """Start the sum of the used-parameter map unless it is under way or not needed. A collective call."""
        ...

    def should_launch(self, members: Sequence[int]) -> bool:
        """Whether a bucket of these parameters is launched at all. May wait for the other ranks."""
        ...

    def resolve(self) -> tuple[list[int], list[int]] | None:
        """Indices of parameters unused on this rank, and on every rank; None if the ranks were not compared."""
        ...

    def forget(self) -> None:
        """Forget this backward. If `resolve` was not called, it had no result."""
        ...


def choose(settings: Settings, layout: Layout, nodes: Sequence[Node], used_map: UsedMap) -> Participation:
    """The policy for these settings; `nodes` are the parameters' AccumulateGrad nodes."""
    if settings.static_graph:
        return StaticGraph(layout.names, used_map)
    if settings.find_unused:
        return FindUnused(layout.names, partial(autograd.find_unreached, nodes), used_map, settings.skip_unused)
    if settings.drops:
        return DroppedLayers(layout, settings.drops)
    return MissingAsZero() if settings.missing_as_zero else AllRequired(layout.names)


class MissingAsZero:
    """A parameter without a gradient counts as zero. An older gradient that is still in `.grad` counts too."""

    defers_launch = is_first_backward = False

    def begin(self, used: bytearray) -> Sequence[int]:
        """Expect every parameter."""
        used[:] = bytes(len(used))
        return ()

    def take_part_without_data(self) -> None:
        """Nothing to prepare: zeros in the buckets are enough."""

    def end(self, _used: bytearray, _missing: Sequence[int]) -> Fault | None:
        """Accept missing gradients."""
        return None

    def start_map_reduce(self) -> None:
        """Nothing to agree on."""

    def should_launch(self, _members: Sequence[int]) -> bool:
        """Always."""
        return True

    def resolve(self) -> tuple[list[int], list[int]] | None:
        """Nothing was compared."""
        return None

    def forget(self) -> None:
        """Nothing is kept from one backward to the next."""


class AllRequired(MissingAsZero):
    """Every parameter takes part in every backward on every rank; a missing gradient is a fault."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    @override
    def end(self, _used: bytearray, missing: Sequence[int]) -> Fault | None:
        return Fault(missing=[self._names[index] for index in missing], indices=list(missing)) if missing else None
