"""Broadcasts that give every rank the same start: parameters, optimizer state and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ddpobs.errors import HorovodError
from ddpobs.horovod import agreement
from ddpobs.horovod.calls import Call, described
from ddpobs.horovod.collectives import start_broadcast
from ddpobs.horovod.failures import failures_as_internal_errors
from ddpobs.horovod.operations import start
from ddpobs.horovod.process import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy `root_rank`'s tensors to every rank.

    Args:
        params: A `state_dict()`, `named_parameters()` or `parameters()`, with the same names on every rank.
        root_rank: The rank that sends.
        process_set: The ranks that take part.

    Raises:
        HorovodError: `params` is none of these.
        MismatchError: The ranks' names, shapes, dtypes or roots differ. Raised on every rank.
    """
    _broadcast("broadcast_parameters", _named_tensors(params), root_rank, process_set)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    try:
        items: list[Any] = sorted(params.items()) if isinstance(params, Mapping) else list(params)
        pairs = [("", item) if isinstance(item, torch.Tensor) else (item[0], item[1]) for item in items]
    except (TypeError, LookupError):
        raise HorovodError(
            "broadcast_parameters: expected a state_dict, named_parameters() or parameters(), got "
            f"{type(params).__name__}"
        ) from None
    return [(str(name), value) for name, value in pairs if isinstance(value, torch.Tensor)]


def _broadcast(function: str, named: list[tuple[str, torch.Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast tensors, on which the ranks agree together."""
    tensors = tuple([described(tensor, name) for name, tensor in named])
    agreed = start(Call(function, None, (("root_rank", int(root_rank)),), tensors), process_set)
    handles = [start_broadcast(tensor, root_rank, name or None, agreed) for name, tensor in named]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the state and hyperparameters of `root_rank`'s optimizer to every rank, where the state may be empty.

    Where it is empty, parameters without a gradient get zeros, as Horovod leaves them.

    Args:
        optimizer: An optimizer of the same parameters on every rank.
        root_rank: The rank that sends.
        model: The module whose `Embedding(sparse=True)` get sparse zeros.
        process_set: The ranks that take part.
    """
    is_root = dist.get_rank() == root_rank
    state = optimizer.state_dict()
    if not state["state"]:
        _make_gradients(optimizer, model)
    templates = broadcast_object(
        pytree.tree_map_only(torch.Tensor, lambda tensor: _Template(tensor.to("meta"), tensor.device.type), state),
        root_rank,
        "broadcast_optimizer_state",
        process_set,
    )
    if not is_root:
        state = pytree.tree_map_only(
            _Template, lambda t: torch.empty_like(t.meta, device=torch.device(t.device_type)), templates
        )
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    _broadcast("broadcast_optimizer_state", [("", tensor) for tensor in tensors], root_rank, process_set)
    if not is_root:
        optimizer.load_state_dict(state)


def _make_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    modules = [] if model is None else model.modules()
    sparse = {id(each.weight) for each in modules if isinstance(each, torch.nn.Embedding) and each.sparse}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
            parameter.grad = zeros.to_sparse(1) if is_sparse else zeros


@dataclass(frozen=True)
class _Template:
    """A tensor without its values, and the type of its device."""

    meta: torch.Tensor
    device_type: str


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return `root_rank`'s object on every rank; it must be picklable.

    Raises:
        MismatchError: The ranks' roots or names differ. Raised on every rank.
    """
    call = Call("broadcast_object", name, (("root_rank", int(root_rank)),))
    agreement.of(process_set).check(call, always=True)
    objects = [obj]
    with failures_as_internal_errors():
        dist.broadcast_object_list(objects, root_rank, group=process_set.group)
    return objects[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, in the order of ranks."""
    agreement.of(process_set).check(Call("allgather_object", name), always=True)
    gathered: list[Any] = [None] * process_set.size()
    with failures_as_internal_errors():
        dist.all_gather_object(gathered, obj, group=process_set.group)
    return gathered
