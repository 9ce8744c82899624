"""Exchanges by the script's own collectives: gradients reduced by hand, or parameters averaged from time to time.

The exchange is known by its size alone: between two steps of an optimizer, the script moved as many elements in
collectives as the module has parameters, apart from a factor for compression.
"""

from __future__ import annotations

from ddpobs import wire

BY_HAND = 0.25
"""Share of the elements that the script must move in collectives to count as their reduction by hand.

A logged loss is a few elements, and is no reduction."""
_MIN_EXCHANGES = 2
"""A single large collective may also be a broadcast at the start, or gather a checkpoint."""


class Exchanges:
    """Exchanges of one module.

    Attributes:
        count: Number of exchanges.
    """

    def __init__(self) -> None:
        self.count = self._first = self._last = 0

    @property
    def are_regular(self) -> bool:
        """Whether the script keeps the replicas together by itself."""
        return self.count >= _MIN_EXCHANGES

    def look(self, optimizer_steps: int, moved: int, elements: int) -> None:
        """Count what was moved between two steps of the optimizer; what comes before its first step is no exchange.

        Args:
            optimizer_steps: Steps of the optimizer before.
            moved: Elements that the script moved since the last of them.
            elements: Elements of the module's parameters.
        """
        if optimizer_steps and moved >= BY_HAND * elements > 0:
            self.count += 1
            self._first, self._last = self._first or optimizer_steps, optimizer_steps

    def facts(self) -> dict[str, wire.Scalar]:
        """Number of exchanges, and of optimizer steps from one to the next."""
        every = round((self._last - self._first) / (self.count - 1)) if self.count > 1 else 0
        return {"exchanges": self.count, "every": every}
