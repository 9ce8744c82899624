"""Exchanges by the script's own collectives: gradients reduced by hand, or parameters averaged from time to time.

An exchange is a moment between two steps of an optimizer in which the script moved as many elements in collectives as
the module has parameters, apart from a factor for compression. It is *exact* if all-reduces over all ranks moved just
as many, or a multiple, with room for a logged loss: then it makes the replicas equal, and they are compared. Any other
is known by its size alone, and may be something else.
"""

from __future__ import annotations

from ddpobs import wire

BY_HAND = 0.25
"""Share of the elements that the script must move in collectives to count as their reduction by hand.

A logged loss is a few elements, and is no reduction."""
_MAX_EXCESS = 0.1
"""Share of the module's elements that an exact exchange may move beside them."""
_MIN_EXCHANGES = 2
"""A single large collective may also be a broadcast at the start, or gather a checkpoint."""


class Exchanges:
    """Exchanges of one module.

    Attributes:
        count: Number of exchanges.
        exact: Number of the exact ones among them.
        is_exact: Whether the last one was.
    """

    def __init__(self) -> None:
        self.count = self.exact = self._first = self._last = 0
        self.is_exact = False

    @property
    def are_regular(self) -> bool:
        """Whether the script keeps the replicas together by itself."""
        return self.count >= _MIN_EXCHANGES

    def look(self, optimizer_steps: int, moved: int, reduced: int, elements: int) -> bool:
        """Count what was moved between two steps of the optimizer; what comes before its first step is no exchange.

        Args:
            optimizer_steps: Steps of the optimizer before.
            moved: Elements that the script moved since the last of them.
            reduced: Those of all-reduces over all ranks.
            elements: Elements of the module's parameters.

        Returns:
            Whether it was an exchange.
        """
        if not optimizer_steps or not moved >= BY_HAND * elements > 0:
            return False
        self.count += 1
        self.is_exact = reduced >= elements and reduced % elements <= _MAX_EXCESS * elements
        self.exact += self.is_exact
        self._first, self._last = self._first or optimizer_steps, optimizer_steps
        return True

    def facts(self) -> dict[str, wire.Scalar]:
        """Number of exchanges, of exact ones, and of optimizer steps from one to the next."""
        every = round((self._last - self._first) / (self.count - 1)) if self.count > 1 else 0
        return {"exchanges": self.count, "exact": self.exact, "every": every}
