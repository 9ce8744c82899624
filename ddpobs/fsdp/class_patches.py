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
        """Call torch's method, which may launch the unit's all-gather."""
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
        units: Their units.
    """

    def __init__(self, models: Mapping[Any, AttachedModel], units: Mapping[Any, AttachedUnit]) -> None:
        self._models, self._units = models, units
        self._patches = Patches()

    def install(self) -> None:
        """Wrap the methods."""
        self.remove()  # They are still wrapped if the last attached models were garbage-collected.
        self._patches.put(fully_shard.state_class(), "_root_pre_forward", self._report_forward)
        self._patches.put(fully_shard.state_class(), "_root_post_backward_final_callback", self._report_end)
        for name, report in (("unshard", "gather"), ("wait_for_unshard", "use"), ("post_backward", "reduce")):
            self._patches.put(fully_shard.unit_class(), name, self._through(report))

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

    def _through(self, report: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        units = self._units

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(unit: Any, *args: Any, **kwargs: Any) -> Any:
                attached = units.get(unit)
                if attached is None:
                    return original(unit, *args, **kwargs)
                return getattr(attached, report)(unit, original, *args, **kwargs)

            return call

        return around
