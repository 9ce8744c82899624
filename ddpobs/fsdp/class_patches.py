"""Patches of torch's classes of units that report to the attached model and its units. The models stay unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ddpobs.torch_seam import fully_shard
from ddpobs.torch_seam.patching import Patches


class AttachedModel(Protocol):
    """Receives the calls of one model's root."""

    def forward_began(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record that the root's forward was called."""
        ...

    def backward_ended(self) -> None:
        """Record that the engine has ended the root's backward."""
        ...


class AttachedUnit(Protocol):
    """Receives the calls of one unit's methods: `call` is torch's method, of the unit."""

    def gather(self, unit: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch's method, which launches the unit's all-gather."""
        ...

    def use(self, unit: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch's method, which waits for the unit's all-gather."""
        ...

    def reduce(self, unit: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch's method, which may reduce the unit's gradients."""
        ...


class UnitPatches:
    """Wraps methods of torch's states and units, while installed.

    Args:
        models: Attached models by the state of their root.
        units: Their units by `id`: a dictionary with weak keys calls functions at each look-up.
    """

    def __init__(self, models: Mapping[Any, AttachedModel], units: Mapping[int, AttachedUnit]) -> None:
        self._models, self._units = models, units
        self._patches = Patches()

    def install(self) -> None:
        """Wrap the methods."""
        self.remove()  # They are still wrapped if the last attached models were garbage-collected.
        self._patches.put(fully_shard.state_class(), "_root_pre_forward", self._report_forward)
        self._patches.put(fully_shard.state_class(), "_root_post_backward_final_callback", self._report_end)
        for name, around in (
            ("unshard", self._report_gather),
            ("wait_for_unshard", self._report_use),
            ("post_backward", self._report_reduction),
        ):
            self._patches.put(fully_shard.unit_class(), name, around)

    def remove(self) -> None:
        """Restore the methods."""
        self._patches.undo()

    def _report_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _root_pre_forward(state: Any, module: Any, args: Any, kwargs: Any) -> Any:
            attachment = self._models.get(state)
            if attachment is not None:
                fully_shard.initialise(state)
                if fully_shard.begins_forward(state):
                    attachment.forward_began(args, kwargs)
            return original(state, module, args, kwargs)

        return _root_pre_forward

    def _report_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _root_post_backward_final_callback(state: Any) -> Any:
            result = original(state)
            attachment = self._models.get(state)
            if attachment is not None:
                attachment.backward_ended()
            return result

        return _root_post_backward_final_callback

    def _report_gather(self, original: Callable[..., Any]) -> Callable[..., Any]:
        units, is_gathered = self._units, fully_shard.is_gathered

        def unshard(unit: Any, *args: Any, **kwargs: Any) -> Any:
            attached = units.get(id(unit))
            if attached is None or is_gathered(unit):
                return original(unit, *args, **kwargs)
            return attached.gather(unit, original, *args, **kwargs)

        return unshard

    def _report_use(self, original: Callable[..., Any]) -> Callable[..., Any]:
        units, is_gathering = self._units, fully_shard.is_gathering

        def wait_for_unshard(unit: Any, *args: Any, **kwargs: Any) -> Any:
            attached = units.get(id(unit))
            if attached is None or not is_gathering(unit):
                return original(unit, *args, **kwargs)
            return attached.use(unit, original, *args, **kwargs)

        return wait_for_unshard

    def _report_reduction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        units = self._units

        def post_backward(unit: Any, *args: Any, **kwargs: Any) -> Any:
            attached = units.get(id(unit))
            if attached is None:
                return original(unit, *args, **kwargs)
            return attached.reduce(unit, original, *args, **kwargs)

        return post_backward
