"""Fingerprints of a module's gradients, parameters and buffers, by which the collector compares replicas.

Every N steps a rank hashes its gradients after their reduction, and its parameters and buffers at the next forward. A
hash combines the exclusive or of all eight-byte words (`torch.hash_tensor`) with their sum: one flipped bit changes
it. Gradients that agree while parameters differ show that the optimizer, or user code after it, made the difference. On
CUDA the hashes are computed and copied in the stream's order, and read by the telemetry thread later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddpobs import wire

_MIX = -0x61C8864680B583EB
"""2^64 over the golden ratio, as a signed integer: an odd factor that spreads the bits of the first of two hashes."""
_PLACES = torch.tensor([1 << 8 * place for place in range(7)])


@dataclass
class Sample:
    """The hashes of one step, on their way.

    Attributes:
        step: Number of synchronised backward passes before it.
        gradients: One hash per parameter, int64; None until they are computed.
        parameters: The same for parameters, then buffers.
    """

    step: int
    gradients: Hashes | None = None
    parameters: Hashes | None = None


class Hashes:
    """Hashes that a device may still compute."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._present = [tensor is not None for tensor in tensors]
        hashes = [hash_of(tensor) for tensor in tensors if tensor is not None]
        self._event: Any = None
        if not hashes:
            self._values = torch.zeros(0, dtype=torch.int64)
            return
        device = hashes[0].device
        stacked = torch.stack([value.to(device) for value in hashes])
        if device.type == "cuda":
            self._values = torch.empty(len(hashes), dtype=torch.int64, pin_memory=True)
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

    Args:
        every: Synchronised backward passes from one sample to the next; 0 for no samples.
        parameters: The reduced parameters, in the layout's order of the module.
        names: Their names.
        buffers: Returns names and tensors of the buffers that are the same on every rank.
        send: Receives each `wire.Fingerprint`.
        module: The module's number in this process.
    """

    def __init__(  # noqa: PLR0917 - the facts of one module
        self,
        every: int,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        buffers: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        send: Callable[[wire.Fingerprint], object],
        module: int,
    ) -> None:
        self._every, self._parameters, self._names = every, list(parameters), list(names)
        self._buffers, self._send, self._module = buffers, send, module
        self._count = 0
        self._sample: Sample | None = None
        self._buffer_names: list[str] = []
        self._ready: list[tuple[Sample, list[str]]] = []

    @torch.no_grad()
    def reduced(self) -> None:
        """Hash the gradients where this backward is sampled; called on the training thread after a reduction."""
        if self._every and self._count % self._every == 0:
            self._sample = Sample(self._count, gradients=Hashes([p.grad for p in self._parameters]))
        self._count += 1

    @torch.no_grad()
    def forward_began(self) -> None:
        """Hash parameters and buffers where the last backward was sampled; called once buffers are the same."""
        sample, self._sample = self._sample, None
        if sample is None:
            return
        buffers = list(self._buffers())
        sample.parameters = Hashes([*self._parameters, *(buffer for _, buffer in buffers)])
        self._ready.append((sample, [name for name, _ in buffers]))

    def flush(self) -> None:
        """Send the samples that the device has computed; called on the telemetry thread."""
        while self._ready:
            sample, buffer_names = self._ready[0]
            assert sample.gradients is not None
            assert sample.parameters is not None
            if not (sample.gradients.is_ready() and sample.parameters.is_ready()):
                return
            self._ready.pop(0)
            values = sample.parameters.values()
            self._send(
                wire.Fingerprint(
                    module=self._module,
                    synchronised=sample.step,
                    names=self._names,
                    buffer_names=buffer_names,
                    gradients=sample.gradients.values(),
                    parameters=values[: len(self._names)],
                    buffers=values[len(self._names) :],
                )
            )


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """Hash of a tensor's bits and shape, int64, on its device; a sparse tensor's of its indices and values."""
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce()
        return hash_of(tensor.indices()) ^ hash_of(tensor.values())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = octets[: octets.numel() // 8 * 8].view(torch.int64)
    rest = octets[words.numel() * 8 :].to(torch.int64)
    # An exclusive or alone takes [x, x] for [y, y]; the sum of the words does not.
    xor = torch.hash_tensor(words).view(torch.int64) if words.numel() else words.sum()
    return xor * _MIX + words.sum() + (rest * _PLACES[: len(rest)].to(rest.device)).sum()
