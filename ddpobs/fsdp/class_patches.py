"""Patches of torch's classes of units that report to a model's attachment, if it has one. The models stay unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ddpobs.torch_seam import fully_shard
from ddpobs.torch_seam.patching import Patches


class Attached(Protocol):
    """Receives the calls of one model's units."""

    def forward_began(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record that the root's forward was called."""
        ...

    def gather(self, unit: Any, call: Callable[[], Any]) -> Any:
        """Call torch's function, which may launch the unit's all-gather."""
        ...

    def use(self, unit: Any, call: Callable[[], Any]) -> Any:
        """Call torch's function, which waits for the unit's all-gather."""
        ...

    def reduce(self, unit: Any, call: Callable[[], Any]) -> Any:
        """Call torch's function, which may reduce the unit's gradients."""
        ...

    def backward_ended(self) -> None:
        """Record that the engine has ended the root's backward."""
        ...


class UnitPatches:
    """Wraps methods of torch's states and units, while installed.

    Args:
        by_root: Attachments by the state of their root.
        by_unit: Attachments by unit.
    """

    def __init__(self, by_root: Mapping[Any, Attached], by_unit: Mapping[Any, Attached]) -> None:
        self._by_root, self._by_unit = by_root, by_unit
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
            attachment = self._by_root.get(state)
            if attachment is not None:
                fully_shard.initialise(state)
                if fully_shard.begins_forward(state):
                    attachment.forward_began(args, kwargs)
            return original(state, module, args, kwargs)

        return _root_pre_forward

    def _report_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _root_post_backward_final_callback(state: Any) -> Any:
            result = original(state)
            attachment = self._by_root.get(state)
            if attachment is not None:
                attachment.backward_ended()
            return result

        return _root_post_backward_final_callback

    def _through(self, report: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        by_unit = self._by_unit

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(unit: Any, *args: Any, **kwargs: Any) -> Any:
                attachment = by_unit.get(unit)
                if attachment is None:
                    return original(unit, *args, **kwargs)
                return getattr(attachment, report)(unit, lambda: original(unit, *args, **kwargs))

            return call

        return around
