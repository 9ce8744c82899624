"""Contiguous memory for tensors that lie elsewhere: MPI reads and writes flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors' elements one after the other; a view if it is one contiguous tensor."""
    if len(tensors) == 1 and _lies_flat(tensors[0]):
        return tensors[0].detach().view(-1)
    return torch.cat([tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in tensors])


def landing(tensors: Sequence[torch.Tensor], filled: bool = False) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return a flat buffer for the tensors' elements, and a function that moves its content into the tensors.

    Args:
        tensors: The tensors that get the result.
        filled: Whether the buffer begins with the tensors' content.
    """
    if len(tensors) == 1 and _lies_flat(tensors[0]):
        return tensors[0].detach().view(-1), _nothing
    size = sum(tensor.numel() for tensor in tensors)
    buffer = flat(tensors) if filled else torch.empty(size, dtype=tensors[0].dtype)

    def unpack() -> None:
        parts = buffer.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    return buffer, unpack


def _lies_flat(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _nothing() -> None:
    pass
