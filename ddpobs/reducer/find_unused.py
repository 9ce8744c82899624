"""The policy of `find_unused_parameters`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.used_map import UsedMap


class FindUnused:
    """Parameters may be left out, different ones in each backward and on each rank.

    The engine announces at the start of a backward which parameters it will reach. No walk over the graph is needed,
    and outputs that are computed but left out of the loss are handled correctly.

    The engine cannot announce parameters inside reentrant checkpoints: their backward is a graph of its own. Nor can it
    announce that a custom function returns None. So the first backward does not rely on the announcement. If it was
    wrong on any rank, every later backward launches its buckets at its end. The set of buckets still waiting differs
    between ranks, so early launches would order the collectives of several modules differently on each rank.

    Args:
        names: The parameters' names.
        unreached: Returns the parameters that the engine will not reach.
        used_map: Sums over the ranks which parameters were used.
        skips: Buckets that no rank uses are not launched.
    """

    def __init__(
        self, names: Sequence[str], unreached: Callable[[], list[int]], used_map: UsedMap, skips: bool
    ) -> None:
        self._names, self._unreached, self._map, self._skips = names, unreached, used_map, skips
        self._defers = self._first = True
        self._announced: list[int] = []
        self._absent: list[int] = []
        self._surprised = self._warned = False

    @property
    def defers_launch(self) -> bool:
        """Whether the announcement is not yet verified, or proved wrong."""
        return self._defers

    @property
    def is_first_backward(self) -> bool:
        """Whether the announcement is not yet verified."""
        return self._first

    def begin(self, used: bytearray) -> Sequence[int]:
        """Read the announcement, and start the sum over the ranks unless the announcement is unreliable."""
        self._announced = self._unreached()
        if self._defers:
            return ()
        self._absent = [index for index in self._announced if not used[index]]
        self._map.launch(self._absent)
        return self._announced

    def take_part_without_data(self) -> None:
        """Report every parameter as unused on this rank."""
        self._absent = list(range(len(self._names)))
        self._surprised = False
        if not self._defers:
            self._map.launch(self._absent)

    def end(self, used: bytearray, missing: Sequence[int]) -> Fault | None:
        """Determine the absent parameters, or report a gradient that was not announced."""
        if self._defers:
            self._absent = [index for index in missing if not used[index]]
            self._surprised = set(self._announced) != set(self._absent)
            return None
        surprises = [self._names[index] for index in self._absent if used[index]]
        if not surprises:
            return None
        return Fault(
            message=f"{surprises[0]} took part in the backward although autograd had not announced it: it sits in a "
            "reentrant checkpoint that was not used in the first backward. Use checkpoint(..., use_reentrant=False)"
        )

    def start_map_reduce(self) -> None:
        """Start the sum if it could not start at the beginning."""
        if self._defers and not self._map.launched:
            self._map.launch(self._absent, self._surprised)

    def should_launch(self, members: Sequence[int]) -> bool:
        """With `skip_all_reduce_unused_params`, launch a bucket that any rank uses on all of them."""
        if not self._skips or not set(members) <= set(self._absent):
            return True
        self._map.wait()
        users = self._map.read()
        return any(bool(users[index]) for index in members)

    def resolve(self) -> tuple[list[int], list[int]]:
        """Read the sum if a parameter is absent on this rank, and in the first backward. Reading waits for a device."""
        self._map.wait()
        globally: list[int] = []
        if self._absent or self._first:
            users = self._map.read()
            globally = [index for index in self._absent if not users[index]]
            if self._first:
                self._defers = bool(users[-1])
                self._warn_if_needless(users)
        self._first = False
        return self._absent, globally

    def forget(self) -> None:
        """Forget the sum over the ranks."""
        self._map.forget()

    def _warn_if_needless(self, users: torch.Tensor) -> None:
        if not self._warned and bool((users[:-1] == users[:-1].max()).all()) and not self._absent:
            self._warned = True
            warnings.warn(
                "find_unused_parameters=True, but every parameter took part in the first backward on every rank; "
                "if that holds for all of them the flag can be left out",
                stacklevel=2,
            )
