"""Torch's FSDP2 (`fully_shard`), as far as ddpobs uses it.

A *unit* is torch's `FSDPParamGroup`: parameters that are gathered and reduced together. Only a script that has imported
`torch.distributed.fsdp` can have one. The import takes long, so ddpobs never does it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_PACKAGE = "torch.distributed.fsdp._fully_shard"
STATE_MODULE = f"{_PACKAGE}._fsdp_state"
"""Module of `FSDPState`, whose `_root_pre_forward` begins the forward of a model."""


class UnitParameter(NamedTuple):
    """A parameter of a unit.

    Attributes:
        name: Its name in the root module, or in its own module before the first forward.
        size: Number of elements of the whole parameter on this rank's tensor-parallel part.
        gathered: Type in which it is gathered.
        reduced: Type in which its gradient is reduced; None if it requires none.
    """

    name: str
    size: int
    gathered: torch.dtype
    reduced: torch.dtype | None


def is_fully_sharded(model: object) -> bool:
    """Whether `fully_shard` was applied to this module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and hasattr(fsdp, "FSDPModule") and isinstance(model, fsdp.FSDPModule)


def state_class() -> Any:
    """Return the class of a module's state."""
    return sys.modules[STATE_MODULE].FSDPState


def unit_class() -> Any:
    """Return the class of units."""
    return sys.modules[f"{_PACKAGE}._fsdp_param_group"].FSDPParamGroup


def initialise(state: Any) -> None:
    """Do at once what torch does at the first forward, names included; nothing if it was done before."""
    state._lazy_init()


def is_initialised(state: Any) -> bool:
    """Whether torch did that: a unit may be gathered before the first forward."""
    return state._is_root is not None


def root_of(state: Any) -> torch.nn.Module:
    """Return the module of a root's state."""
    return state._modules[0]  # type: ignore[no-any-return]


def begins_forward(state: Any) -> bool:
    """Whether this state's forward is the outermost one of its model."""
    return state._state_ctx.iter_forward_root is None


def is_in_forward(state: Any) -> bool:
    """Whether the outermost forward under way is this state's, and not that of a module in its model."""
    return state._state_ctx.iter_forward_root is state


def units_of(model: torch.nn.Module) -> list[Any]:
    """Return the units of a model and of its modules, in the order of their registration."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if is_fully_sharded(module):
            for group in _groups(module._get_fsdp_state()):  # type: ignore[operator]
                if group.fsdp_params:
                    found.setdefault(id(group), group)
    return list(found.values())


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # Until torch 2.12.


def name_of(unit: Any) -> str:
    """Name of the unit's module in the root; empty for the root's own unit."""
    return str(unit._module_fqn or "")


def parameters_of(unit: Any) -> list[UnitParameter]:
    """Return the parameters of a unit whose types torch has initialised."""
    return [
        UnitParameter(
            parameter._param_fqn or parameter._module_info.param_name,
            parameter._orig_size.numel(),
            parameter.param_dtype or parameter.orig_dtype,
            (parameter.reduce_dtype or parameter.param_dtype or parameter.orig_dtype)
            if parameter.sharded_param.requires_grad
            else None,
        )
        for parameter in unit.fsdp_params
    ]


def shards_of(unit: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that an optimizer steps on: this rank's shards."""
    return [parameter.sharded_param for parameter in unit.fsdp_params]


def shard_group(unit: Any) -> dist.ProcessGroup | None:
    """Return the group over which the unit is sharded; None for a unit that is replicated only."""
    return getattr(unit.mesh_info, "shard_process_group", None)


def data_parallel_group(unit: Any) -> dist.ProcessGroup:
    """Return the group of all ranks if the unit's shards and replicas are on all; else the group of one dimension."""
    world = dist.distributed_c10d._get_default_group()
    if unit.mesh_info.mesh.size() == world.size():
        return world
    return shard_group(unit) or replicate_group(unit) or world


def shards(unit: Any) -> bool:
    """Whether the unit's parameters are divided among several ranks."""
    group = shard_group(unit)
    return group is not None and group.size() > 1


def replicate_group(unit: Any) -> dist.ProcessGroup | None:
    """Return the group over which the unit's shards are replicated; None without replicas."""
    return getattr(unit.mesh_info, "replicate_process_group", None)


def replica_ranks(units: Sequence[Any]) -> list[int] | None:
    """Return the ranks that hold the same shards of all units as this one; None if there are none, or they vary."""
    groups = [replicate_group(unit) for unit in units]
    ranks = {tuple(dist.get_process_group_ranks(group)) if group is not None else () for group in groups}
    return sorted(ranks.pop()) if len(ranks) == 1 and any(ranks) else None


def reshards(unit: Any) -> bool:
    """Whether the unit frees its parameters after forward, so that backward gathers them again."""
    return unit.post_forward_mesh_info is not None


def reduces(unit: Any) -> bool:
    """Whether the unit's next reduction is a whole one; that of a micro-batch may be left out, or its all-reduce."""
    return unit.reduce_grads and (unit.all_reduce_grads or replicate_group(unit) is None)


def is_gathering(unit: Any) -> bool:
    """Whether an all-gather was launched whose result is not used yet."""
    return unit._all_gather_result is not None


def is_gathered(unit: Any) -> bool:
    """Whether the unit's parameters are whole or being gathered, so that `unshard` launches nothing."""
    return unit.is_unsharded or unit._all_gather_result is not None


def state_of(model: torch.nn.Module) -> Any:
    """Return the state of a module that `fully_shard` was applied to."""
    return model._get_fsdp_state()  # type: ignore[operator]
