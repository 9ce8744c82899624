"""Side groups: process groups over the ranks of another group, for exchanges that need their own connections.

To create or destroy a group takes all of its ranks, and modules are garbage-collected at different times on different
ranks. Side groups therefore belong to the group whose ranks they have. All modules of that group share them, and they
live as long as it does.
"""

from __future__ import annotations

import secrets
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.torch_seam.collectives import broadcast_from_first, name_of, python_groups, wait_for

_Use = tuple["weakref.ref[dist.ProcessGroup]", torch.device, int]

_side_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Use] = weakref.WeakKeyDictionary()
"""The use of each side group. Weak keys: a strong reference to a destroyed group would keep its store's port open."""


def get_side_group(group: dist.ProcessGroup, device: torch.device, index: int) -> dist.ProcessGroup:
    """Return the side group for one use; all callers with the same arguments share it.

    Every rank of the group, and no other rank, must call this for its uses in the same order. The first call for a use
    creates the side group, and destroys the side groups of groups that were destroyed.

    Args:
        group: A process group that is registered with torch.
        device: The device of the tensors. Backward passes of several devices run at once, in another order per rank.
        index: Distinguishes several side groups for one device.
    """
    use = (weakref.ref(group), device, index)
    for side_group, other_use in list(_side_groups.items()):
        if other_use == use:
            return side_group
    _destroy_orphans()
    side_group = _create(group, device)
    _side_groups[side_group] = use
    return side_group


def _destroy_orphans() -> None:
    registered = dist.distributed_c10d._world.pg_map
    for side_group, (group, *_) in list(_side_groups.items()):  # A side group of a side group comes after it.
        if side_group in registered and group() not in registered:
            dist.destroy_process_group(side_group)


def _create(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Create a group over the same ranks; every rank must call this.

    `torch.distributed.new_group` either needs every rank of the world, or (with `use_local_synchronization`) names the
    group by the number of groups a rank has. Ranks that have other groups besides would then wait for each other for
    ever.
    """
    # The first rank draws the name. Another rank may have created no group before, or one whose name an earlier had.
    name = torch.tensor([secrets.randbits(62)], device=device)
    wait_for(broadcast_from_first(group, [name]))
    return create_named(group, f"{name.item():x}", device)


def create_named(group: dist.ProcessGroup, name: str, device: torch.device) -> dist.ProcessGroup:
    """Create a group over the same ranks, without the group's connections; every rank must call this.

    Args:
        group: A process group that is registered with torch.
        name: The same on every rank, and never used before.
        device: The device of the tensors.
    """
    c10d, ranks = dist.distributed_c10d, dist.get_process_group_ranks(group)
    side_group, _ = c10d._new_process_group_helper(
        len(ranks),
        group.rank(),
        ranks,
        dist.Backend(dist.get_backend(group)),
        c10d._get_default_store(),
        group_name=c10d.GroupName(f"{name_of(group)}/ddpobs/{name}"),
        timeout=timeout_of(group, device),
    )
    c10d._world.pg_group_ranks[side_group] = {rank: index for index, rank in enumerate(ranks)}
    disable_communicator_split(side_group, device)
    return side_group  # type: ignore[no-any-return]


def disable_communicator_split(side_group: dist.ProcessGroup, device: torch.device) -> None:
    """Make NCCL connect the ranks anew at the first collective.

    If the default group is bound to a device, torch would split its communicator instead. For a split NCCL waits for
    every rank of the world, but ranks outside of the group never take part.
    """
    try:
        backend: Any = side_group._get_backend(device)
        options: Any = getattr(backend, "wrapped_pg", backend).options
        if options.split_from is not None:
            options.split_from = None
    except (RuntimeError, AttributeError):  # No NCCL.
        return


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of the group's collectives; torch's default if the backend does not expose it."""
    if isinstance(group, tuple(kind for kind, _ in python_groups)):
        return group.timeout  # type: ignore[attr-defined, no-any-return]
    try:
        backend: Any = group._get_backend(device)
        timeout: timedelta = backend.options._timeout
    except (RuntimeError, AttributeError):
        timeout = dist.distributed_c10d._get_default_timeout(dist.get_backend(group))
    return timeout
