"""Fault broadcast: every rank raises the same error if one rank's backward is faulty. A good one pays almost nothing.

A rank that lacks a gradient launches its buckets all the same, because the other ranks would wait for ever. First it
writes the fault into the process group's store. Then it sets the first element of its last bucket to NaN, which the
all-reduce carries to every rank. A rank that finds the NaN reads the store.

If the last bucket cannot carry a NaN, as with a communication hook of the user's, one more element is reduced instead.

Parameters that start to require gradients are reported in the same way (`late_parameters.py`). That is no fault if
every rank reports the same ones.
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

from ddpobs.errors import ModelsDifferError, ReducerError, UnusedParametersError
from ddpobs.torch_seam.collectives import all_reduce, name_of, wait_for

_numbers: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()
"""By process group, the number of its next broadcaster. A broadcaster takes its number at its first backward, so that
the numbers agree between ranks, even if a rank has modules of other groups or copies of its own."""


@dataclass(frozen=True)
class Fault:
    """A fault of one rank: parameters whose gradient is missing, or a message.

    Attributes:
        missing: Names of the parameters.
        indices: Their indices.
        message: Of another fault.
        torch_message: The message of torch's DDP in this case, for a search.
        interrupted: An error ended the backward.
        added: Names of parameters that started to require gradients, which is a fault only if the ranks differ.
        absent: The ones among them without a gradient in this backward.
    """

    missing: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    message: str = ""
    torch_message: str = ""
    interrupted: bool = False
    added: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


class FaultBroadcast:
    """Reports one reducer's faults to all ranks, and theirs to this one. All ranks number their backward passes alike.

    Args:
        group: The reducer's process group.

    Attributes:
        fault: The first fault of this rank's backward; None if there is none.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._store: Any = None
        self._number = 0
        self.fault: Fault | None = None
        self._published = False
        self._pending_checks: list[PendingCheck] = []

    def start_backward(self) -> None:
        """Count one more synchronised backward."""
        if self._store is None:
            name = f"ddpobs/alarm/{name_of(self._group)}/{next(_numbers.setdefault(self._group, count()))}"
            self._store = PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._number += 1

    def record(self, fault: Fault | None) -> None:
        """Keep a fault until it is published, unless an earlier one is kept. Any fault replaces added parameters."""
        if self.fault is None or (self.fault.added and not self._published and fault is not None):
            self.fault = fault

    def forget(self) -> None:
        """The backward is over."""
        self.fault, self._published = None, False

    def publish(self) -> None:
        """Write this rank's fault into the store, once, before any rank can read the last bucket's result."""
        if self.fault is None or self._published:
            return
        self._published = True
        key = str(self._number)
        entry = self._store.add(key, 1)
        self._store.set(f"{key}/{entry}", json.dumps({"rank": self._group.rank(), **asdict(self.fault)}))

    def poison(self, buffer: torch.Tensor) -> None:
        """Publish the fault, and mark the buffer that is launched next."""
        self.publish()
        buffer[0] = float("nan")

    def all_reduce_flag(self, device: torch.device) -> torch.Tensor:
        """Reduce a flag that is NaN if any rank has a fault, for buckets that cannot carry it. A collective call."""
        flag = torch.full((1,), float("nan") if self.fault else 0.0, dtype=torch.float32, device=device)
        wait_for(all_reduce(self._group, [flag]))
        return flag

    def raise_if_any_failed(self, element: torch.Tensor, at_once: bool) -> list[Fault]:
        """Raise the same error on every rank if some rank published a fault.

        Returns:
            Each rank's report if all report the same added parameters; empty otherwise.

        Args:
            element: The reduced flag.
            at_once: On a GPU, block until the flag is known. Otherwise a healthy rank continues, and raises in a later
                call.
        """
        if self.fault is not None:
            element.item()  # Every rank has published its fault by the time this is known, on a GPU too.
            return self.raise_published()
        self.check_flag(element, at_once)
        return []

    def check_flag(self, element: torch.Tensor, at_once: bool = False) -> None:
        """Check the flag now if it is on the host, else when the device has delivered it."""
        if element.device.type == "cpu" or (at_once and not torch.cuda.is_current_stream_capturing()):
            value = element.item()
            if value != value:  # noqa: PLR0124 - NaN, also a complex one
                self.raise_published()
        elif not torch.cuda.is_current_stream_capturing():  # A graph's replays run no Python that could check it.
            self._pending_checks.append(PendingCheck(element, self._number))

    def poll_flags(self) -> None:
        """Check the flags that a device has delivered meanwhile, without waiting for it."""
        if self._pending_checks and torch.cuda.is_current_stream_capturing():
            return
        while self._pending_checks and self._pending_checks[0].is_ready():
            check = self._pending_checks.pop(0)
            if check.is_nan():
                self.raise_published(check.number)

    def raise_published(self, number: int | None = None) -> list[Fault]:
        """Raise the faults of a backward. A NaN of the model's own has no entry in the store, and raises nothing.

        Args:
            number: The backward's; None for the one in progress.

        Returns:
            Each rank's report if all report the same added parameters; empty if nothing was published.

        Raises:
            UnusedParametersError: Parameters got no gradient on some rank although all were required.
            ModelsDifferError: Parameters started to require gradients on some ranks only.
            ReducerError: Another fault.
        """
        key = str(self._number if number is None else number)
        if not self._store.check([key]):  # Faults are published before any rank can see the NaN.
            return []
        faults = self._read(key)
        failed = {rank: fault for rank, fault in faults.items() if fault.message}
        if failed:
            messages = "; ".join(f"rank {rank}: {fault.message}" for rank, fault in failed.items())
            of_torch = dict.fromkeys(fault.torch_message for fault in failed.values() if fault.torch_message)
            error = ReducerError("\n".join([messages, *of_torch]))
            error.interrupted = all(fault.interrupted for fault in failed.values())
            raise error
        if all(fault.added for fault in faults.values()):
            self._refuse_differences(faults)
        missing: dict[str, list[int]] = {}
        indices: dict[str, int] = {}
        for rank, fault in faults.items():
            indices |= zip(fault.missing, fault.indices, strict=True)
            for name in fault.missing:
                missing.setdefault(name, []).append(rank)
        if missing:
            raise UnusedParametersError(missing, indices)
        return list(faults.values())

    def _refuse_differences(self, reports: dict[int, Fault]) -> None:
        """Raise if the ranks do not report the same added parameters."""
        ranks: dict[str, list[str]] = {}
        for rank in range(self._group.size()):
            names = reports[rank].added if rank in reports else []
            text = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
            ranks.setdefault(text or "none", []).append(str(rank))
        if len(ranks) > 1:
            by_rank = "; ".join(f"{names} (rank {', '.join(numbers)})" for names, numbers in ranks.items())
            raise ModelsDifferError(
                "parameters started to require gradients after the model was wrapped, but not the same ones on every "
                f"rank: {by_rank}. Unfreeze the same parameters in the same step on every rank"
            )

    def _read(self, key: str) -> dict[int, Fault]:
        """The published faults by rank. The last rank to read them deletes them."""
        entries = [f"{key}/{entry}" for entry in range(1, self._store.add(key, 0) + 1)]
        faults = {
            fault.pop("rank"): Fault(**fault) for entry in entries for fault in [json.loads(self._store.get(entry))]
        }
        if faults and self._store.add(f"{key}/read", 1) == self._group.size():
            # The store may outlive the group, and a later group of the same name counts from the start again.
            for obsolete in (*entries, f"{key}/read", key):
                self._store.delete_key(obsolete)
        return dict(sorted(faults.items()))


class PendingCheck:
    """A flag on its way from a device to the host.

    Args:
        element: The flag, one element.
        number: Of its backward.
    """

    def __init__(self, element: torch.Tensor, number: int) -> None:
        self.number = number
        self._host = torch.empty_like(element, device="cpu", pin_memory=True)
        self._host.copy_(element, non_blocking=True)
        self._copied: Any = torch.cuda.Event()
        # The copy runs on the stream of the element's device, which need not be the current device.
        self._copied.record(torch.cuda.current_stream(element.device))

    def is_ready(self) -> bool:
        """Whether the flag has arrived on the host."""
        return bool(self._copied.query())

    def is_nan(self) -> bool:
        """Whether some rank reported a fault."""
        return bool(torch.isnan(self._host))
