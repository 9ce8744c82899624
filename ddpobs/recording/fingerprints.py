"""Fingerprints of a module's gradients, parameters and buffers, by which the collector compares replicas.

Every N steps a rank hashes its gradients after their reduction, and its parameters and buffers at the next forward. A
hash combines the exclusive or of all eight-byte words (`torch.hash_tensor`) with their sum: one flipped bit changes
it. Gradients that agree while parameters differ show that the optimizer, or user code after it, made the difference. On
CUDA the hashes are computed and copied in the stream's order, and read by the telemetry thread later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ddpobs import wire

_MIX = -0x61C8864680B583EB
"""2^64 over the golden ratio, as a signed integer: an odd factor that spreads the bits of the first of two hashes."""
_MAX_NAMES, _MAX_CHARACTERS = 20_000, 2_000_000
"""Limits of a fingerprint; the collector refuses larger ones."""
_MAX_WAITING = 16
"""Samples that wait for a device; if it hangs, further ones are dropped."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types that are hashed. The operations of a subclass may communicate, as those of a DTensor do."""


@dataclass
class Sample:
    """The hashes of one step, on their way.

    Attributes:
        step: Number of synchronised backward passes before it.
        names: Names of the parameters.
        gradients: One hash per parameter.
        parameters: One hash per parameter, then one per buffer; None until the next forward.
        buffer_names: Names of the buffers.
    """

    step: int
    names: list[str]
    gradients: Hashes
    parameters: Hashes | None = None
    buffer_names: list[str] = field(default_factory=list)


class Hashes:
    """Hashes that a device may still compute."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._present = [tensor is not None and type(tensor) in _PLAIN for tensor in tensors]
        hashes = [
            hash_of(tensor)
            for tensor, present in zip(tensors, self._present, strict=True)
            if present and tensor is not None
        ]
        self._event: Any = None
        if not hashes:
            self._values = torch.zeros(0, dtype=torch.int64, device="cpu")
            return
        device = hashes[0].device
        stacked = torch.stack([value.to(device, non_blocking=True) for value in hashes])
        if device.type == "cuda":
            self._values = torch.empty(len(hashes), dtype=torch.int64, device="cpu", pin_memory=True)
            self._values.copy_(stacked, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._values = stacked

    def is_ready(self) -> bool:
        """Whether the values can be read without waiting for the device."""
        return self._event is None or bool(self._event.query())

    def values(self) -> wire.Ints:
        """One int64 per tensor; 0 stands for a tensor that was missing."""
        values = np.zeros(len(self._present), np.int64)
        values[self._present] = self._values.numpy()
        return values


class Fingerprints:
    """Samples one module's replicas.

    The training thread calls every method but `flush`. The ranks count the same backward passes, also the ones that
    failed or in which a rank took part without data.

    Args:
        every: Synchronised backward passes from one sample to the next; 0 for no samples.
        parameters: The reduced parameters; the list may grow.
        names: Their names.
        send: Receives each `wire.Fingerprint`.
        module: The module's number in this process.
    """

    def __init__(
        self,
        every: int,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        send: Callable[[wire.Fingerprint], object],
        module: int,
    ) -> None:
        self._every, self._parameters, self._names = every, parameters, names
        self._send, self._module = send, module
        self._count = 0
        self._sample: Sample | None = None
        self._ready: deque[Sample] = deque()

    def backward_began(self) -> None:
        """Count a synchronised backward, or this rank's part in another rank's."""
        self._count += 1
        self._sample = None

    @property
    def is_due(self) -> bool:
        """Whether the backward that was counted last is sampled."""
        return self._every > 0 and (self._count - 1) % self._every == 0

    @torch.no_grad()
    def reduced(self) -> None:
        """Hash the gradients if this backward is sampled; call it after the reduction."""
        if not self.is_due or len(self._ready) >= _MAX_WAITING or not self._fits(()):
            return
        gradients = Hashes([parameter.grad for parameter in self._parameters])
        self._sample = Sample(self._count - 1, list(self._names), gradients)

    @property
    def waits_for_forward(self) -> bool:
        """Whether a sample lacks the parameters."""
        return self._sample is not None

    @torch.no_grad()
    def forward_began(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hash the parameters if the last backward was sampled.

        Args:
            buffers: Names and tensors of the buffers that were just made the same on every rank.
        """
        sample, self._sample = self._sample, None
        if sample is None:
            return
        named = list(buffers)
        if not self._fits([name for name, _ in named]):
            named = []
        parameters = self._parameters[: len(sample.names)]
        sample.parameters = Hashes([*parameters, *(buffer for _, buffer in named)])
        sample.buffer_names = [name for name, _ in named]
        self._ready.append(sample)

    def _fits(self, further: Sequence[str]) -> bool:
        names = [*self._names, *further]
        return len(names) <= _MAX_NAMES and sum(map(len, names)) <= _MAX_CHARACTERS

    def flush(self) -> None:
        """Send the samples that the device has computed; called on the telemetry thread, or as the module goes."""
        while self._ready:
            sample = self._ready.popleft()
            assert sample.parameters is not None
            if not (sample.gradients.is_ready() and sample.parameters.is_ready()):
                self._ready.appendleft(sample)
                return
            values, count = sample.parameters.values(), len(sample.names)
            self._send(
                wire.Fingerprint(
                    module=self._module,
                    synchronised=sample.step,
                    names=sample.names,
                    buffer_names=sample.buffer_names,
                    gradients=sample.gradients.values(),
                    parameters=values[:count],
                    buffers=values[count:],
                )
            )


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """Hash of a tensor's bits and shape, int64, on its device; a sparse tensor's of its indices and values."""
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce()
        return hash_of(tensor.indices()) ^ hash_of(tensor.values())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.detach().contiguous()
    if tensor.storage_offset() * tensor.element_size() % 8:  # A part of a bucket, which cannot be viewed as words.
        tensor = tensor.clone()
    octets = tensor.view(-1).view(torch.uint8)
    words = octets[: octets.numel() // 8 * 8].view(torch.int64)
    # An exclusive or alone takes [x, x] for [y, y]; the sum of the words does not.
    total = words.sum()
    rest = octets[words.numel() * 8 :]
    if rest.numel():
        total = total + torch.nn.functional.pad(rest, (0, 8 - rest.numel())).view(torch.int64).sum()
    return torch.hash_tensor(words).view(torch.int64) * _MIX + total if words.numel() else total
