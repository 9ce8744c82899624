"""Participation policies: which parameters take part in a backward.

Each reducer has one policy, chosen by the user's settings: `AllRequired` (the default), `FindUnused`
(find_unused_parameters), `StaticGraph` (static_graph) or `MissingAsZero` (Horovod's optimizer). The reducer calls it at
the start and at the end of each synchronised backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.used_map import UsedMap


class Participation(Protocol):
    """What the reducer asks."""

    @property
    def defers_launch(self) -> bool:
        """Nothing may be launched before the end of the backward that is under way."""
        ...

    @property
    def is_first_backward(self) -> bool:
        """How the next backward goes is found out in this one: all ranks have to know whether it came to a result."""
        ...

    def begin(self, used: bytearray) -> Sequence[int]:
        """Indices of the parameters that will not come; `used` says which came in passes under `no_sync`."""
        ...

    def take_part_without_data(self) -> None:
        """This rank has no data left and only takes part in the others' backward: nothing will come."""
        ...

    def end(self, used: bytearray, missing: Sequence[int]) -> Fault | None:
        """Every gradient has come; `missing` are those awaited in vain. Says what is wrong about that."""
        ...

    def start_map_reduce(self) -> None:
        """Start the collective over the ranks that is still owed, if there is one. Every rank calls it alike."""
        ...

    def should_launch(self, members: Sequence[int]) -> bool:
        """Whether a bucket of these is launched at all; may wait for the other ranks."""
        ...

    def resolve(self) -> tuple[list[int], list[int]] | None:
        """Parameters unused on this rank, and those unused on every rank; None where nobody looked."""
        ...

    def forget(self) -> None:
        """The backward is over; one that was not settled had no result."""
        ...


class MissingAsZero:
    """A parameter without a gradient counts as zero. An older gradient that is still in `.grad` counts too."""

    defers_launch = is_first_backward = False

    def begin(self, used: bytearray) -> Sequence[int]:
        """Wait for every parameter."""
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

    def end(self, _used: bytearray, missing: Sequence[int]) -> Fault | None:
        """Report the missing parameters."""
        return Fault(missing=[self._names[index] for index in missing]) if missing else None


class FindUnused:
    """Parameters may be left out, others each time, others on each rank.

    The engine says beforehand what it will reach: no walk over the graph, and right also for outputs that were
    computed but left out of the loss. What it cannot announce are parameters inside reentrant checkpoints, whose
    backward is a graph of its own. So in the first backward nobody relies on it; where any rank was surprised, all
    wait for the end of each backward from then on. Then no bucket is launched before: which of them wait for what never
    comes is another on every rank, and so would be their order among other modules' collectives.
    """

    def __init__(
        self, names: Sequence[str], unreached: Callable[[], list[int]], used_map: UsedMap, skips: bool
    ) -> None:
        """Take the parameters' names, the engine's answer, the map, and whether unused buckets are left out."""
        self._names, self._unreached, self._map, self._skips = names, unreached, used_map, skips
        self._late = self._first = True
        self._announced: list[int] = []
        self._absent: list[int] = []
        self._surprised = self._warned = False

    @property
    def defers_launch(self) -> bool:
        """Until the engine is known to be right about what will come, or if it is not."""
        return self._late

    @property
    def is_first_backward(self) -> bool:
        """Whether the engine is right about what will come."""
        return self._first

    def begin(self, used: bytearray) -> Sequence[int]:
        """Ask the engine, and start the sum over the ranks at once unless it cannot be relied on yet."""
        self._announced = self._unreached()
        if self._late:
            return ()
        self._absent = [index for index in self._announced if not used[index]]
        self._map.launch(self._absent)
        return self._announced

    def take_part_without_data(self) -> None:
        """Take part as one that used nothing."""
        self._absent = list(range(len(self._names)))
        self._surprised = False
        if not self._late:
            self._map.launch(self._absent)

    def end(self, used: bytearray, missing: Sequence[int]) -> Fault | None:
        """Find out what was absent, or that the engine was wrong after all."""
        if self._late:
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
        """Start the sum where it could not start at the begin."""
        if self._late and not self._map.launched:
            self._map.launch(self._absent, self._surprised)

    def should_launch(self, members: Sequence[int]) -> bool:
        """With `skip_all_reduce_unused_params`: a bucket that any rank uses is launched on all of them."""
        if not self._skips or not set(members) <= set(self._absent):
            return True
        self._map.wait()
        users = self._map.read()
        return any(bool(users[index]) for index in members)

    def resolve(self) -> tuple[list[int], list[int]]:
        """Read the sum where something is absent here (a device is waited for only then), and in the first one."""
        self._map.wait()
        nobody: list[int] = []
        if self._absent or self._first:
            users = self._map.read()
            nobody = [index for index in self._absent if not users[index]]
            if self._first:
                self._late = bool(users[-1])
                self._warn_if_needless(users)
        self._first = False
        return self._absent, nobody

    def forget(self) -> None:
        """The sum over the ranks with it."""
        self._map.forget()

    def _warn_if_needless(self, users: torch.Tensor) -> None:
        if not self._warned and bool((users[:-1] == users[:-1].max()).all()) and not self._absent:
            self._warned = True
            warnings.warn(
                "find_unused_parameters=True, but every parameter took part in the first backward on every rank; "
                "where that holds for all of them the flag can be left out",
                stacklevel=2,
            )


class StaticGraph:
    """The same parameters take part in every backward, each the same number of times.

    The first backward counts, and reduces only at its end; the others know when a parameter has come for the last
    time, also inside reentrant checkpoints.
    """

    def __init__(self, names: Sequence[str], used_map: UsedMap) -> None:
        """Take the parameters' names and the map that the first backward shares."""
        self._names, self._map = names, used_map
        self.counts = [0] * len(names)
        self.remaining = [0] * len(names)
        self.defers_launch = True
        self._unused: list[int] = []
        self._used_between: list[int] = []
        self._nobody: list[int] = []
        self._users: torch.Tensor | None = None
        self._abstains = False

    @property
    def is_first_backward(self) -> bool:
        """Which parameters take part, and how often."""
        return self.defers_launch

    def begin(self, used: bytearray) -> Sequence[int]:
        """Known since the first backward."""
        if self.defers_launch:
            self.counts[:] = [0] * len(self.counts)
            return ()
        self.remaining[:] = self.counts
        self._used_between = [index for index in self._unused if used[index]]
        used[:] = bytes(len(used))
        return self._unused

    def take_part_without_data(self) -> None:
        """Take part in the first backward's verdict; this rank's own first backward is still to come."""
        self._abstains = True

    def is_last_arrival(self, index: int) -> bool:
        """A parameter's gradient was accumulated once more; whether that was the last time in this backward."""
        if self.defers_launch:
            self.counts[index] += 1
            return self.counts[index] == 1
        self.remaining[index] -= 1
        return self.remaining[index] == 0

    def end(self, used: bytearray, missing: Sequence[int]) -> Fault | None:
        """Keep the first backward's verdict, and hold the later ones to it."""
        if self.defers_launch:
            self._unused = [index for index in missing if not used[index]]
            return None
        changed = self._used_between + [index for index, left in enumerate(self.remaining) if left]
        return self.changed(changed) if changed else None

    def changed(self, indices: Sequence[int]) -> Fault:
        """What is wrong where these came more or less often than in the first backward, or under `no_sync` alone."""
        names = ", ".join(self._names[index] for index in indices[:20])
        return Fault(
            message=f"the graph changed although static_graph=True: {names} took part more or less often than in the "
            "first backward, in this one or under no_sync before it. Leave static_graph out"
        )

    def start_map_reduce(self) -> None:
        """Agree in the first backward of any rank."""
        if self._users is None and not self._map.launched:
            self._map.launch(range(len(self._names)) if self._abstains else self._unused)

    def should_launch(self, _members: Sequence[int]) -> bool:
        """Always."""
        return True

    def resolve(self) -> tuple[list[int], list[int]]:
        """The first backward's verdict."""
        if self._users is None:
            self._map.wait()
            self._users = self._map.read()
        if self.defers_launch and not self._abstains:
            users = self._users
            self._nobody = [index for index in self._unused if not users[index]]
            self.defers_launch = False
        return self._unused, self._nobody

    def forget(self) -> None:
        """The sum over the ranks with it."""
        self._map.forget()
        self._abstains = False
