"""`join`: a rank that is out of data takes part in the other ranks' synchronisations."""

from __future__ import annotations

from itertools import count

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpobs.errors import HorovodError
from ddpobs.horovod import agreement
from ddpobs.horovod.collectives import barrier
from ddpobs.horovod.optimizer import reducers
from ddpobs.horovod.position import rank, size
from ddpobs.horovod.reduction import OptimizerReducer

_joins = count()


def join(device: int = -1) -> int:
    """Take part in the other ranks' synchronisations with zeros, until all ranks have joined; for a rank out of data.

    Meanwhile the other ranks may use the only DistributedOptimizer, and no other collective. Its Average still divides
    by the number of all ranks. Without a DistributedOptimizer the ranks only wait for each other.

    Args:
        device: No effect.

    Returns:
        The rank that joined last; the highest if there are several.

    Raises:
        HorovodError: There are several DistributedOptimizers.
    """
    number = next(_joins)
    if size() == 1:
        return 0
    if len(reducers) > 1:
        raise HorovodError(f"join(): expected at most one DistributedOptimizer, got {len(reducers)}")
    store = PrefixStore(f"ddpobs/join/{number}", dist.distributed_c10d._get_default_store())
    if not reducers:
        if store.add("joined", 1) == size():
            store.set("last", str(rank()))
        barrier()
        return int(store.get("last"))
    (reducer,) = reducers
    with agreement.joined():
        return _join(reducer, store)


def _join(reducer: OptimizerReducer, store: PrefixStore) -> int:
    store.set(str(rank()), str(reducer.synchronised))
    keys = [str(other) for other in range(size())]
    while True:
        reducer.participate_with_zeros()
        # Ranks that joined before this synchronisation set their keys before it began: all ranks read the same keys.
        if not store.check(keys):
            continue
        joined = [int(store.get(key)) for key in keys]
        if max(joined) < reducer.synchronised:
            return max(other for other, synchronised in enumerate(joined) if synchronised == max(joined))
