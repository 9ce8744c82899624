"""Process groups made beside another one, over the same ranks, for whoever needs connections of its own there.

To make or destroy one takes all of its ranks, and when a module is collected differs from rank to rank. So they belong
to the group that they were made beside: all modules of that group share them, and they stay for as long as it does.
"""

from __future__ import annotations

import secrets
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.torch_seam.collectives import broadcast_from_first, name_of, wait_for

_Use = tuple["weakref.ref[dist.ProcessGroup]", torch.device, int]

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, _Use] = weakref.WeakKeyDictionary()
"""What each was made for. Torch holds those that are not destroyed; one held here would keep a store, and its port."""


def group_beside(group: dist.ProcessGroup, device: torch.device, place: int) -> dist.ProcessGroup:
    """The process group for one use over the same ranks, the same one for whoever asks.

    Every rank of the group calls this for its uses in the same order, and no other needs to. The first call for a use
    makes it, and destroys those whose own group was destroyed.

    Args:
        group: A process group that torch knows.
        device: Whose tensors it is for: several devices' backward passes run at once, in another order on every rank.
        place: Tells several for one device apart.
    """
    use = (weakref.ref(group), device, place)
    for made, its in list(_made.items()):
        if its == use:
            return made
    _destroy_left()
    made = _another(group, device)
    _made[made] = use
    return made


def _destroy_left() -> None:
    known = dist.distributed_c10d._world.pg_map
    for made, (group, *_) in list(_made.items()):  # One beside another of these comes after it.
        if made in known and group() not in known:
            dist.destroy_process_group(made)


def _another(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Over the same ranks, and called on all of them.

    `torch.distributed.new_group` either wants every rank of the world, or (with `use_local_synchronization`) names the
    group by how many groups a rank has, so that ranks with other groups besides wait for each other for ever.
    """
    # Its first rank names it: a group may have a rank that has made none before, and a name that an earlier one had.
    name = torch.tensor([secrets.randbits(62)], device=device)
    wait_for(broadcast_from_first(group, [name]))
    c10d, ranks = dist.distributed_c10d, dist.get_process_group_ranks(group)
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        group.rank(),
        ranks,
        dist.Backend(dist.get_backend(group)),
        c10d._get_default_store(),
        group_name=c10d.GroupName(f"{name_of(group)}/ddpobs/{name.item():x}"),
        timeout=_timeout_of(group, device),
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    split_from_none(made, device)
    return made  # type: ignore[no-any-return]


def split_from_none(made: dist.ProcessGroup, device: torch.device) -> None:
    """Have NCCL connect the ranks anew at the first collective.

    Where the default group is bound to a device, torch would split its communicator instead: for that NCCL waits for
    every rank of the world, of which those outside of the group do not come.
    """
    try:
        backend: Any = made._get_backend(device)
        options: Any = getattr(backend, "wrapped_pg", backend).options
        if options.split_from is not None:
            options.split_from = None
    except (RuntimeError, AttributeError):  # No NCCL.
        return


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's own collectives may take; torch's default for one that does not tell."""
    try:
        backend: Any = group._get_backend(device)
        timeout: timedelta = backend.options._timeout
    except (RuntimeError, AttributeError):
        timeout = dist.distributed_c10d._get_default_timeout(dist.get_backend(group))
    return timeout
