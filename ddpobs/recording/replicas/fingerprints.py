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
_SMALL = 4096
"""Elements up to which tensors are copied together; to hash each one takes 10 to 20 µs."""
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
    """Hashes that a device may still compute.

    Large tensors are hashed one by one. Small ones, of which a model may have many, are only copied, together; `values`
    hashes them on the telemetry thread.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._count = len(tensors)
        self._large: list[int] = []
        self._groups: list[tuple[list[int], list[int], torch.Tensor]] = []
        """Indices, lengths and elements of small tensors."""
        self._events: list[Any] = []
        hashes: list[torch.Tensor] = []
        small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor is None or type(tensor) not in _PLAIN:
                continue
            if tensor.numel() > _SMALL or tensor.layout != torch.strided or tensor.is_complex():
                self._large.append(index)
                hashes.append(hash_of(tensor))
            elif tensor.numel():
                small.setdefault((tensor.dtype, tensor.device), []).append(index)
        for indices in small.values():
            members: list[Any] = [tensors[index] for index in indices]
            flat = torch._C._nn.flatten_dense_tensors([*members, members[0]])  # A single one would not be copied.
            self._groups.append((indices, [member.numel() for member in members], self._to_host(flat)))
        self._hashes = torch.zeros(0, dtype=torch.int64, device="cpu")
        if hashes:
            device = hashes[0].device
            self._hashes = self._to_host(torch.stack([value.to(device, non_blocking=True) for value in hashes]))

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the host, which is complete when the events are."""
        if values.device.type != "cuda":
            return values
        copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        copy.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(values.device))
        self._events.append(event)
        return copy

    def is_ready(self) -> bool:
        """Whether the values can be read without waiting for the device."""
        return all(bool(event.query()) for event in self._events)

    def values(self) -> wire.Ints:
        """One int64 per tensor; 0 stands for a tensor that was missing."""
        values = np.zeros(self._count, np.int64)
        values[self._large] = self._hashes.numpy()
        for indices, lengths, flat in self._groups:
            values[indices] = _hashes_of_parts(flat, lengths)
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
        module: Number of `wire.Fingerprint.module`.
        part: Returns the part of a parameter or a gradient that is hashed.
    """

    def __init__(
        self,
        every: int,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        send: Callable[[wire.Fingerprint], object],
        module: int,
        *,
        part: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._every, self._parameters, self._names, self._part = every, parameters, names, part
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
        found = (parameter.grad for parameter in self._parameters)
        gradients = Hashes([None if gradient is None else self._part(gradient) for gradient in found])
        self._sample = Sample(self._count - 1, list(self._names), gradients)

    def exchanged(self) -> None:
        """Count an exchange by the script; if it is sampled, the parameters are hashed at the next forward."""
        self.backward_began()
        if self.is_due and len(self._ready) < _MAX_WAITING and self._fits(()):
            self._sample = Sample(self._count - 1, list(self._names), Hashes([None] * len(self._names)))

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
        parameters = map(self._part, self._parameters[: len(sample.names)])
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


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """Hash of a tensor's bits, int64, on its device; a sparse tensor's of its indices and values."""
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
    if not words.numel():
        return total
    xor = torch.hash_tensor(words).view(torch.int64)
    # Folded, so that the highest bits of a word do not cancel out.
    return (xor ^ (xor >> 32)) * _MIX + total


def _hashes_of_parts(flat: torch.Tensor, lengths: Sequence[int]) -> wire.Ints:
    """The same combination over the elements of consecutive parts, in NumPy."""
    octets = flat.view(torch.uint8).numpy()
    elements = octets.view(f"u{flat.element_size()}").astype(np.uint64)
    starts = np.cumsum([0, *lengths[:-1]])
    end = starts[-1] + lengths[-1]
    xor = np.bitwise_xor.reduceat(elements[:end], starts)
    total = np.add.reduceat(elements[:end], starts)
    mix = np.uint64(_MIX % 2**64)
    hashes: wire.Ints = ((xor ^ (xor >> np.uint64(32))) * mix + total).view(np.int64)
    return hashes
