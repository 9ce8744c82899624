"""The used-parameter map: an int32 vector over the parameters, summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.observers import ModuleObserver
from ddpobs.torch_seam.collectives import wait_for


class UsedMap:
    """How many ranks used each parameter.

    One more element counts the ranks on which the engine's announcement was wrong.

    Args:
        count: Number of parameters.
        device: Device of the parameters.
        reduce: Starts the sum over all ranks.
        recorder: Receives the times of the sum; None with telemetry off.

    Attributes:
        launched: The sum of this backward is started, or complete.
        recorder: As given.
    """

    def __init__(
        self,
        count: int,
        device: torch.device,
        reduce: Callable[[torch.Tensor], dist.Work],
        recorder: ModuleObserver | None,
    ) -> None:
        self._count, self._device, self._reduce, self.recorder = count, device, reduce, recorder
        self._work: dist.Work | None = None
        self._map = torch.zeros(0)
        self._launched_ns: Any = 0
        self._done_ns: list[Any] = []
        self.launched = False

    def launch(self, absent: Sequence[int], surprised: bool = False) -> None:
        """Start the sum.

        Args:
            absent: Indices of the parameters that this rank did not use.
            surprised: The engine's announcement was wrong on this rank.
        """
        # The copy of other memory than page-locked may wait for the device, and is refused while a graph is captured.
        used = torch.ones(self._count + 1, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        used[list(absent)] = 0
        used[-1] = int(surprised)
        self._map = used.to(self._device, non_blocking=True)
        recorder = self.recorder
        self._launched_ns = recorder.now() if recorder is not None else 0
        self._work, self.launched = self._reduce(self._map), True
        done_ns: list[Any] = []
        self._done_ns = done_ns
        # The stamp is 0 while a CUDA graph is captured. Then no callback may run either: it would use a stream that the
        # capture does not end.
        if recorder is not None and self._launched_ns:
            self._work.get_future().add_done_callback(lambda _: done_ns.append(recorder.now()))

    def wait(self) -> None:
        """Make the current stream wait for the sum."""
        if self._work is not None:
            wait_for(self._work)
            self._work = None
            if self.recorder is not None and self._launched_ns:
                done_ns = self._done_ns[0] if self._done_ns else self.recorder.now()
                self.recorder.communicated("unused_map", self._launched_ns, done_ns)

    def read(self) -> torch.Tensor:
        """The sum on the host, shape [parameters + 1]. Call `wait` before; this waits for the device."""
        return self._map.cpu()

    def users(self) -> torch.Tensor:
        """The last sum on the device, shape [parameters]; zeros if there was none."""
        if not len(self._map):
            return torch.zeros(self._count, dtype=torch.int32, device=self._device)
        return self._map[:-1]

    def forget(self) -> None:
        """Forget the sum: the next backward has its own."""
        self._work, self.launched = None, False
