"""The policy of dropped layers: parameters that every rank knows to be unused before the backward.

Each rank draws the layers of a step from a seed and the number of synchronised backward passes, which is the same on
every rank because each of them is a collective. So no message is needed: buckets of dropped layers are never launched,
and the others need not wait for their gradients. A rank whose forward ran other layers reports a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ddpobs.buckets.layout import Layout
from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.layer_drop import LayerDrop

_Layer = tuple[int, int]
"""Identity of a LayerDrop, and the index of a layer in it."""


class DropPlan:
    """The layers that each step of a module drops.

    Args:
        module: Any module; without a LayerDrop in it the plan is empty.

    Attributes:
        step: Number of synchronised backward passes that have begun.
        dropped: Names of the parameters that the latest of them leaves out.
        layers_of: By name of a parameter that some step may leave out, the layers on which this depends: it is left out
            if each of the sets has a dropped layer.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        named = list(module.named_modules(remove_duplicate=False))
        self._lists = {name: child for name, child in named if isinstance(child, LayerDrop)}
        self.step = 0
        self.dropped: frozenset[str] = frozenset()
        self.layers_of = _layers_of(module, self._lists) if self._lists else {}

    def __bool__(self) -> bool:
        """Whether there are layers to drop."""
        return bool(self._lists)

    def __str__(self) -> str:
        """The arguments that must be the same on every rank."""
        return "; ".join(
            f"{name}: probability {layers.probability}, seed {layers.seed}" for name, layers in self._lists.items()
        )

    def draw(self) -> None:
        """Choose the layers of a forward, whose gradients the next synchronised backward reduces."""
        for layers in self._lists.values():
            layers.draw(self.step)

    def backward_began(self) -> None:
        """Count a synchronised backward, this rank's or one of other ranks in which it takes part without data."""
        if self._lists:
            dropped = {(id(a), index) for a in self._lists.values() for index in a.dropped_in(self.step)}
            self.dropped = frozenset(
                name for name, uses in self.layers_of.items() if all(dropped & layers for layers in uses)
            )
            self.step += 1


NO_LAYERS = DropPlan(torch.nn.Module())
"""The plan of a module without a LayerDrop."""


def _layers_of(module: torch.nn.Module, lists: dict[str, LayerDrop]) -> dict[str, frozenset[frozenset[_Layer]]]:
    """By name of a parameter, for each place at which the module has it, the layers around it.

    A parameter with a place outside of any layer is not there: no step drops it.
    """
    layers = {
        f"{prefix}.{child}." if prefix else f"{child}.": (id(drop), index)
        for prefix, drop in lists.items()
        for index, child in enumerate(drop._modules)
    }
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    uses: dict[str, list[frozenset[_Layer]]] = {}
    for place, parameter in module.named_parameters(remove_duplicate=False):
        around = frozenset(layer for prefix, layer in layers.items() if place.startswith(prefix))
        uses.setdefault(names[id(parameter)], []).append(around)
    return {name: frozenset(places) for name, places in uses.items() if all(places)}


class _Dropped(Protocol):
    """The part of a plan that the policy reads."""

    @property
    def dropped(self) -> frozenset[str]:
        """Names of the parameters that this backward leaves out."""
        ...


class DroppedLayers:
    """Dropped layers get no gradient, and every other parameter gets one, on every rank.

    Args:
        layout: The parameters and their buckets.
        plan: Has the parameters of dropped layers when a backward begins.
    """

    defers_launch = is_first_backward = False

    def __init__(self, layout: Layout, plan: _Dropped) -> None:
        self._layout, self._plan = layout, plan
        self._dropped: list[int] = []
        self._absent: set[int] = set()
        self._used_before: list[int] = []

    def begin(self, used: bytearray) -> Sequence[int]:
        """The parameters of dropped layers."""
        self.take_part_without_data()
        self._used_before = [index for index in self._dropped if used[index]]
        used[:] = bytes(len(used))
        return self._dropped

    def take_part_without_data(self) -> None:
        """Leave the same parameters out as the other ranks."""
        names = self._layout.names
        self._dropped = [index for index, name in enumerate(names) if name in self._plan.dropped]
        self._absent = set(self._dropped)

    def end(self, used: bytearray, missing: Sequence[int]) -> Fault | None:
        """Report gradients of dropped layers, and missing gradients of the others."""
        names = self._layout.names
        surprises = [names[index] for index in self._dropped if used[index] or index in self._used_before]
        if surprises:
            more = f" and {len(surprises) - 20} more" if len(surprises) > 20 else ""
            return Fault(
                message=f"{', '.join(surprises[:20])}{more} got a gradient in a step that drops the layer. Iterate "
                "over the LayerDrop in train mode, and call the backward of a forward before the next forward"
            )
        return Fault(missing=[names[index] for index in missing], indices=list(missing)) if missing else None

    def start_map_reduce(self) -> None:
        """Nothing to agree on."""

    def should_launch(self, members: Sequence[int]) -> bool:
        """Whether a bucket has a parameter that is not dropped. The last bucket is needed for the news of a fault."""
        return members is self._layout.buckets[-1].members or not self._absent.issuperset(members)

    def resolve(self) -> tuple[list[int], list[int]]:
        """The parameters of dropped layers, unused on this rank and on every rank."""
        return self._dropped, self._dropped

    def forget(self) -> None:
        """Nothing is kept from one backward to the next."""
