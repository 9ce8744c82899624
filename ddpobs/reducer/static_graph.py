"""The policy of `static_graph`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.used_map import UsedMap

_TORCH_MESSAGE = (
    "Torch's DDP raises for this, if at all, in the next forward: Your training graph has changed in this iteration, "
    "e.g., one parameter is unused in first iteration, but then got used in the second iteration. this is not "
    "compatible with static_graph set to True. Or: Expected to have finished reduction in the prior iteration before "
    "starting a new one. This error indicates that your training graph has changed in this iteration, e.g., one "
    "parameter is used in first iteration, but then got unused in the second iteration. this is not compatible with "
    "static_graph set to True.\nParameter indices which did not receive grad for the same uses as in the first "
    "iteration: "
)
"""The end of the message, with torch's two messages word for word."""


class StaticGraph:
    """The same parameters take part in every backward, each the same number of times.

    The first backward counts the arrivals of each gradient, and launches every bucket at its end. In later ones the
    count shows the last arrival, also inside reentrant checkpoints.

    Args:
        names: The parameters' names.
        used_map: Sums over the ranks which parameters were used; needed once.

    Attributes:
        counts: By parameter, arrivals in the first backward.
        remaining: By parameter, arrivals still expected in this backward.
        defers_launch: The first backward is not over.
    """

    def __init__(self, names: Sequence[str], used_map: UsedMap) -> None:
        self._names, self._map = names, used_map
        self.counts = [0] * len(names)
        self.remaining = [0] * len(names)
        self.defers_launch = True
        self._locally_unused: list[int] = []
        self._globally_unused: list[int] = []
        self._used_under_no_sync: list[int] = []
        self._undefined: set[int] = set()
        self._users: torch.Tensor | None = None
        self._without_data = False

    @property
    def is_first_backward(self) -> bool:
        """Whether the arrivals are still being counted."""
        return self.defers_launch

    def begin(self, used: bytearray) -> Sequence[int]:
        """The parameters that were unused in the first backward."""
        if self.defers_launch:
            self.counts[:] = [0] * len(self.counts)
            return ()
        self.remaining[:] = self.counts
        self._used_under_no_sync = [i for i in self._locally_unused if used[i] and i not in self._undefined]
        used[:] = bytes(len(used))
        return self._locally_unused

    def take_part_without_data(self) -> None:
        """Take part in the comparison of the first backward; this rank's own first backward is still to come."""
        self._without_data = True

    def is_last_arrival(self, index: int) -> bool:
        """Count an arrival; True if it was the last of this backward, or the first of the first backward."""
        if self.defers_launch:
            self.counts[index] += 1
            return self.counts[index] == 1
        self.remaining[index] -= 1
        return self.remaining[index] == 0

    def is_undefined(self, index: int, parameter: torch.Tensor) -> bool:
        """Ignore an arrival without a gradient if the first backward had none for the parameter on any rank."""
        if index not in self._undefined or parameter.grad is not None:
            return False
        self.remaining[index] = 0
        return True

    def _settle_undefined(self) -> None:
        """Count parameters that the first backward reached without a gradient as used, unless no rank had a gradient.

        If no rank had a gradient, none is expected any more.
        """
        reached = {index for index in self._locally_unused if self.counts[index]}
        self._undefined = reached.intersection(self._globally_unused)
        for index in self._undefined:
            self.counts[index] = 0
        self._locally_unused = [i for i in self._locally_unused if i not in reached - self._undefined]

    def end(self, used: bytearray, missing: Sequence[int]) -> Fault | None:
        """Record the first backward's unused parameters, and compare later ones with it."""
        if self.defers_launch:
            self._locally_unused = [index for index in missing if not used[index]]
            return None
        changed = self._used_under_no_sync + [index for index, count in enumerate(self.remaining) if count]
        return self.changed(changed) if changed else None

    def changed(self, indices: Sequence[int]) -> Fault:
        """The fault that these parameters arrived more or less often than at first, or under `no_sync` alone."""
        names = ", ".join(self._names[index] for index in indices[:20])
        return Fault(
            message=f"the graph changed although static_graph=True: {names} took part more or less often than in the "
            "first backward, in this one or under no_sync before it. Leave static_graph out",
            torch_message=_TORCH_MESSAGE + ", ".join(map(str, indices[:20])),
        )

    def start_map_reduce(self) -> None:
        """Start the sum in the first backward of any rank."""
        if self._users is None and not self._map.launched:
            self._map.launch(range(len(self._names)) if self._without_data else self._locally_unused)

    def should_launch(self, _members: Sequence[int]) -> bool:
        """Always."""
        return True

    def resolve(self) -> tuple[list[int], list[int]]:
        """The unused parameters of the first backward."""
        if self._users is None:
            self._map.wait()
            self._users = self._map.read()
        if self.defers_launch and not self._without_data:
            users = self._users
            unused = self._locally_unused
            self._globally_unused = [index for index in unused if not users[index]]
            self.defers_launch = False
            self._settle_undefined()
            return unused, self._globally_unused
        return self._locally_unused, self._globally_unused

    def forget(self) -> None:
        """Forget the sum over the ranks."""
        self._map.forget()
        self._without_data = False
