"""How every rank learns that something is wrong with one rank's backward, at the cost of one look at one element.

A rank that owes a gradient launches its buckets all the same, or the others would wait for ever. First it writes
what is wrong into the process group's store, then it makes the first element of the last bucket NaN, which the
all-reduce carries to every rank; whoever sees it reads the store. Nothing is sent in the good case, but one element of
its own where the last bucket cannot carry a NaN: through a hook of the user's, say.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpobs.errors import ReducerError, UnusedParametersError
from ddpobs.torch_seam.collectives import all_reduce, name_of, wait_for

_numbers: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()
"""Alarms of each process group, numbered as their first backward begins: in the same order on every rank of it, also
where a rank has modules of other groups, or a copy of its own."""


@dataclass(frozen=True)
class Fault:
    """What is wrong on one rank: gradients that are missing, by name, or something else in words."""

    missing: list[str] = field(default_factory=list)
    message: str = ""
    interrupted: bool = False


class FaultBroadcast:
    """One reducer's alarm. Every rank numbers its synchronised backward passes alike.

    Args:
        group: The reducer's process group.

    Attributes:
        fault: What is wrong with this rank's backward; the first thing counts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._store: Any = None
        self._number = 0
        self.fault: Fault | None = None
        self._published = False
        self._pending_checks: list[PendingCheck] = []

    def start_backward(self) -> None:
        """One more synchronised backward, on every rank."""
        if self._store is None:
            name = f"ddpobs/alarm/{name_of(self._group)}/{next(_numbers.setdefault(self._group, count()))}"
            self._store = PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._number += 1

    def record(self, fault: Fault | None) -> None:
        """Keep what is wrong, if anything is, until it is told."""
        self.fault = self.fault or fault

    def forget(self) -> None:
        """That backward is over."""
        self.fault, self._published = None, False

    def publish(self) -> None:
        """Write down what is wrong here, once, and before any rank can see the last bucket's result."""
        if self.fault is None or self._published:
            return
        self._published = True
        key = str(self._number)
        place = self._store.add(key, 1)
        said = {"rank": self._group.rank(), **asdict(self.fault)}
        self._store.set(f"{key}/{place}", json.dumps(said))

    def poison(self, buffer: torch.Tensor) -> None:
        """Tell it, and have the bucket that is launched next carry it to every rank."""
        self.publish()
        buffer[0] = float("nan")

    def all_reduce_flag(self, device: torch.device) -> torch.Tensor:
        """An element that is NaN where any rank has something to tell, for buckets that cannot carry it."""
        flag = torch.full((1,), float("nan") if self.fault else 0.0, dtype=torch.float32, device=device)
        wait_for(all_reduce(self._group, [flag]))
        return flag

    def raise_if_any_failed(self, element: torch.Tensor, at_once: bool) -> None:
        """Raise the same error on every rank where some rank told of a fault.

        Args:
            element: What came of the marked one.
            at_once: Wait for it on a device, too, where one that is healthy else goes on and hears of it later.
        """
        if self.fault is not None:
            element.item()  # A device, too, has then heard every rank.
            self.raise_published()
        self.check_flag(element, at_once)

    def check_flag(self, element: torch.Tensor, at_once: bool = False) -> None:
        """Look at the element that would be NaN; on a device it is only looked at once it is there."""
        if element.device.type == "cpu" or (at_once and not torch.cuda.is_current_stream_capturing()):
            value = element.item()
            if value != value:  # noqa: PLR0124 - NaN, also a complex one
                self.raise_published()
        elif not torch.cuda.is_current_stream_capturing():  # A graph's replays run no Python that could look.
            self._pending_checks.append(PendingCheck(element, self._number))

    def poll_flags(self) -> None:
        """Look at what a device has brought meanwhile, without waiting for it."""
        if self._pending_checks and torch.cuda.is_current_stream_capturing():
            return
        while self._pending_checks and self._pending_checks[0].is_ready():
            look = self._pending_checks.pop(0)
            if look.is_nan():
                self.raise_published(look.number)

    def raise_published(self, number: int | None = None) -> None:
        """Raise what any rank has told of that backward; a NaN of the model's own has nothing written down.

        Raises:
            UnusedParametersError: Some rank's backward left out parameters that nobody said it may.
            ReducerError: Another fault.
        """
        key = str(self._number if number is None else number)
        if not self._store.check([key]):  # Whoever tells does so before any rank can see the NaN.
            return
        count = self._store.add(key, 0)
        places = [f"{key}/{place}" for place in range(1, count + 1)]
        told = [json.loads(self._store.get(place)) for place in places]
        if told and self._store.add(f"{key}/read", 1) == self._group.size():
            # The store may outlive the group, whose successor of the same name counts from the beginning again.
            for done in (*places, f"{key}/read", key):
                self._store.delete_key(done)
        told.sort(key=lambda said: said["rank"])
        missing: dict[str, list[int]] = {}
        for said in told:
            for name in said["missing"]:
                missing.setdefault(name, []).append(said["rank"])
        if missing:
            raise UnusedParametersError(missing)
        messages = [f"rank {said['rank']}: {said['message']}" for said in told]
        if messages:
            error = ReducerError("; ".join(messages))
            error.interrupted = all(said["interrupted"] for said in told)
            raise error


class PendingCheck:
    """An element on its way from a device."""

    def __init__(self, element: torch.Tensor, number: int) -> None:
        self.number = number
        self._host = torch.empty_like(element, device="cpu", pin_memory=True)
        self._host.copy_(element, non_blocking=True)
        self._copied: Any = torch.cuda.Event()
        # The copy is on the stream of the element's device, which need not be the current one.
        self._copied.record(torch.cuda.current_stream(element.device))

    def is_ready(self) -> bool:
        """Whether the copy has arrived on the host."""
        return bool(self._copied.query())

    def is_nan(self) -> bool:
        """Whether some rank reported a fault."""
        return bool(torch.isnan(self._host))
