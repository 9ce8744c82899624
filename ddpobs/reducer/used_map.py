"""The used-parameter map: an int32 vector over the parameters, summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.reducer.observer import Observer
from ddpobs.torch_seam.collectives import wait_for


class UsedMap:
    """An int32 vector over the parameters, summed over the ranks: how many used each.

    One more place counts the ranks that met a parameter which the engine had not announced.
    """

    def __init__(
        self,
        count: int,
        device: torch.device,
        reduce: Callable[[torch.Tensor], dist.Work],
        recorder: Observer | None,
    ) -> None:
        """Prepare for `count` parameters, with a `reduce` that starts the sum over all ranks."""
        self._count, self._device, self._reduce, self._recorder = count, device, reduce, recorder
        self._work: dist.Work | None = None
        self._map = torch.zeros(0)
        self._launched_ns: Any = 0
        self._done_ns: list[Any] = []
        self.launched = False
        """Whether this backward has its sum, under way or there."""

    def launch(self, absent: Sequence[int], surprised: bool = False) -> None:
        """Start the sum; `absent` were not used on this rank."""
        # Page-locked for a device: the copy of other memory may wait for it, and is refused in a graph's capture.
        used = torch.ones(self._count + 1, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        used[list(absent)] = 0
        used[-1] = int(surprised)
        self._map = used.to(self._device, non_blocking=True)
        recorder = self._recorder
        self._launched_ns = recorder.now() if recorder is not None else 0
        self._work, self.launched = self._reduce(self._map), True
        done_ns: list[Any] = []
        self._done_ns = done_ns
        # No stamps while a CUDA graph is captured, nor callbacks: they are on streams that the capture would not end.
        if recorder is not None and self._launched_ns:
            self._work.get_future().add_done_callback(lambda _: done_ns.append(recorder.now()))

    def wait(self) -> None:
        """Have the current stream wait for the sum."""
        if self._work is not None:
            wait_for(self._work)
            self._work = None
            if self._recorder is not None and self._launched_ns:
                done_ns = self._done_ns[0] if self._done_ns else self._recorder.now()
                self._recorder.communicated("unused_map", self._launched_ns, done_ns)

    def read(self) -> torch.Tensor:
        """The sum on the host, after `wait`; waits for the device."""
        return self._map.cpu()

    def users(self) -> torch.Tensor:
        """By parameter, how many ranks used it when this was shared last, on the device; zeros where it never was."""
        if not len(self._map):
            return torch.zeros(self._count, dtype=torch.int32, device=self._device)
        return self._map[:-1]

    def forget(self) -> None:
        """The next backward has one of its own."""
        self._work, self.launched = None, False
