"""The same start on every rank: parameters, optimizer state and objects from one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ddpobs.errors import HorovodError
from ddpobs.horovod.collectives import broadcast_async_
from ddpobs.horovod.process import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Have every rank's tensors hold what `root_rank`'s hold.

    Args:
        params: A `state_dict()` or `named_parameters()`, with the same names on every rank.
        root_rank: Whose values.
        process_set: Who takes part.

    Raises:
        HorovodError: Neither of the two came.
    """
    try:
        named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
        tensors = [tensor for _, tensor in named if isinstance(tensor, torch.Tensor)]
    except (TypeError, ValueError):
        raise HorovodError(
            f"broadcast_parameters: expected a state_dict or named_parameters(), got {type(params).__name__}"
        ) from None
    handles = [broadcast_async_(tensor, root_rank, process_set=process_set) for tensor in tensors]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the state and the hyperparameters of `root_rank`'s optimizer; the others may have none yet.

    Args:
        optimizer: Over the same parameters on every rank.
        root_rank: Whose state.
        model: Not needed.
        process_set: Who takes part.
    """
    here = dist.get_rank() == root_rank
    state = optimizer.state_dict()
    described = broadcast_object(
        pytree.tree_map_only(torch.Tensor, lambda tensor: _Described(tensor.to("meta"), tensor.device.type), state),
        root_rank,
        process_set=process_set,
    )
    if not here:
        state = pytree.tree_map_only(
            _Described, lambda one: torch.empty_like(one.shape, device=torch.device(one.device)), described
        )
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    broadcast_parameters([("", tensor) for tensor in tensors], root_rank, process_set)
    if not here:
        optimizer.load_state_dict(state)


@dataclass(frozen=True)
class _Described:
    """A tensor without its values, and the kind of device it is on."""

    shape: torch.Tensor
    device: str


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """What `root_rank` gave, on every rank; it must be picklable."""
    held = [obj]
    dist.broadcast_object_list(held, root_rank, group=process_set.group)
    return held[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """What each rank gave, by rank."""
    gathered: list[Any] = [None] * process_set.size()
    dist.all_gather_object(gathered, obj, group=process_set.group)
    return gathered
