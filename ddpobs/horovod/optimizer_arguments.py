"""What `DistributedOptimizer` is given: checks, the parameters it reduces, their groups and factors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.comm.side_groups import get_side_group
from ddpobs.errors import HorovodError
from ddpobs.horovod.operations import Average
from ddpobs.reducer.late_parameters import Frozen

_BUCKET = 25 * 2**20


def check(optimizer: object, compression: object, passes: Any) -> None:
    """Refuse arguments that would fail later in training, or with an unclear message."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise HorovodError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise HorovodError(
            "compression: expected Compression.none, Compression.fp16 or an object with compress and decompress, "
            f"got {compression!r}"
        )
    if not hasattr(passes, "__index__") or passes < 1:  # NumPy's too.
        raise HorovodError(f"backward_passes_per_step: expected a whole number, at least 1, got {passes!r}")


def trained_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> tuple[list[torch.nn.Parameter], list[str]]:
    """The optimizer's parameters that require gradients, and their names."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if named_parameters is None:
        return parameters, [f"parameter.{index}" for index in range(len(parameters))]
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise HorovodError(
            "named_parameters: expected (name, parameter) pairs, as model.named_parameters() returns them"
        )
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if duplicates:
        raise HorovodError(f"named_parameters: duplicate names: {', '.join(duplicates)}")
    name_by_id = {id(parameter): name for name, parameter in pairs}
    unnamed = [parameter for parameter in parameters if id(parameter) not in name_by_id]
    if unnamed:
        raise HorovodError(
            f"named_parameters: {len(unnamed)} of the optimizer's {len(parameters)} parameters are missing in it"
        )
    return parameters, [name_by_id[id(parameter)] for parameter in parameters]


def frozen_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Sequence[tuple[str, torch.nn.Parameter]] | None
) -> list[Frozen]:
    """The optimizer's parameters that require no gradient now; their gradients will travel dense."""
    names = {id(parameter): name for name, parameter in named_parameters or ()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    first = len(parameters) - len(frozen)
    return [
        (names.get(id(parameter), f"parameter.{index}"), parameter, False)
        for index, parameter in enumerate(frozen, first)
    ]


def group_indices(
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None, parameters: Sequence[torch.nn.Parameter]
) -> list[list[int]] | None:
    """The parameters' indices in each group; None without groups."""
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups < 1:
            raise HorovodError(f"groups: expected at least 1, got {groups}")
        group_size = -(-len(parameters) // groups)
        return [
            list(range(len(parameters)))[begin : begin + group_size] for begin in range(0, len(parameters), group_size)
        ]
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    is_sequence = isinstance(groups, Sequence) and not isinstance(groups, str)
    if not is_sequence or not all(isinstance(p, torch.Tensor) for group in groups for p in group):
        raise HorovodError(f"groups: expected a number or lists of parameters, got {groups!r}")
    indices = [[index_of[id(p)] for p in group if id(p) in index_of] for group in groups]
    flat = [index for group in indices for index in group]
    if len(set(flat)) < len(flat):
        raise HorovodError("groups: a parameter may be in one group only")
    return [group for group in indices if group]


def factors(op: str, predivide: float, ranks: int) -> tuple[float | None, float | None]:
    """The divisor of gradients before the sum over the ranks, and the factor after it; None for neither."""
    if not predivide > 0:
        raise HorovodError(f"gradient_predivide_factor: expected a number above 0, got {predivide}")
    if predivide == 1.0:
        return (float(ranks) if op == Average else None), None
    if op != Average:
        raise HorovodError("gradient_predivide_factor is supported only with op=Average")
    return predivide, predivide / ranks


def get_own_group(group: dist.ProcessGroup, device: torch.device, index: int) -> dist.ProcessGroup:
    """Return a process group for one optimizer's gradients alone.

    If a rank leaves parameters out, their bucket waits there for `synchronize`, while other ranks have launched it. On
    a shared process group the bucket could meet a collective that the script calls in between: a metric's mean, or
    another optimizer's bucket.
    """
    return group if group.size() == 1 else get_side_group(group, device, -1 - index)


def fusion_threshold() -> int:
    """Largest bucket in bytes: HOROVOD_FUSION_THRESHOLD, else DDP's; Horovod's 128 MB would prevent overlap."""
    text = os.environ.get("HOROVOD_FUSION_THRESHOLD")
    if text is None:
        return _BUCKET
    if not text.isdigit():
        raise HorovodError(f"HOROVOD_FUSION_THRESHOLD: expected a number of bytes, got {text!r}")
    return int(text)
