"""Participation policies: which parameters take part in a backward.

| policy | setting | a parameter without a gradient |
|---|---|---|
| `AllRequired` | the default | is a fault |
| `MissingAsZero` | Horovod's optimizer | counts as zero |
| `FindUnused` | `find_unused_parameters` | is compared between the ranks |
| `StaticGraph` | `static_graph` | must be missing in every backward |

A reducer has one policy. It calls `begin`, `end`, `start_map_reduce`, `resolve` and `forget` once in each synchronised
backward, in this order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch.autograd.graph import Node
from typing_extensions import override

from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.settings import Settings
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
            missing: Indices of the parameters whose gradient was expected and did not arrive.
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


def choose(settings: Settings, names: Sequence[str], nodes: Sequence[Node], used_map: UsedMap) -> Participation:
    """The policy that the settings ask for; `nodes` are the parameters' AccumulateGrad nodes."""
    if settings.static_graph:
        return StaticGraph(names, used_map)
    if settings.find_unused:
        return FindUnused(names, partial(autograd.unreached, nodes), used_map, settings.skip_unused)
    return MissingAsZero() if settings.missing_as_zero else AllRequired(names)


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
        """Accept whatever is missing."""
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
        return Fault(missing=[self._names[index] for index in missing]) if missing else None


class FindUnused:
    """Parameters may be left out, different ones in each backward and on each rank.

    The engine announces at the start of a backward which parameters it will reach. No walk over the graph is needed,
    and outputs that are computed but left out of the loss are handled correctly.

    The engine cannot announce parameters inside reentrant checkpoints, whose backward is a graph of its own. So the
    first backward does not rely on the announcement. If any rank got a gradient that was not announced, every later
    backward launches its buckets at its end. The set of buckets still waiting differs between ranks, so early launches
    would order the collectives of several modules differently on each rank.

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
            self._surprised = not set(self._announced) <= set(missing)
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
        self._used_under_no_sync = [index for index in self._locally_unused if used[index]]
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
            "first backward, in this one or under no_sync before it. Leave static_graph out"
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
            self._globally_unused = [index for index in self._locally_unused if not users[index]]
            self.defers_launch = False
        return self._locally_unused, self._globally_unused

    def forget(self) -> None:
        """Forget the sum over the ranks."""
        self._map.forget()
        self._without_data = False
