"""`join`: a rank that is out of data takes part in the other ranks' synchronisations, or in their all-reduces."""

from __future__ import annotations

import time
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpobs.errors import HorovodError, HorovodInternalError, MismatchError
from ddpobs.horovod import agreement
from ddpobs.horovod.agreement import Agreement
from ddpobs.horovod.allreduce import start_allreduce
from ddpobs.horovod.board import Entry, Verdict
from ddpobs.horovod.calls import Facts, summary
from ddpobs.horovod.compression import Compression
from ddpobs.horovod.failures import failures_as_internal_errors
from ddpobs.horovod.operations import Average, Sum
from ddpobs.horovod.optimizer import reducers
from ddpobs.horovod.position import rank, size
from ddpobs.horovod.process import global_process_set
from ddpobs.horovod.reduction import OptimizerReducer

_joins = count()
_PAUSE_S, _PAUSE_OF_A_RANK_S = 0.02, 0.001
"""Pause between two looks at the other ranks: the first, and the second for each rank."""
_COMPRESSORS = {each.__qualname__: each for each in (Compression.none, Compression.fp16)}


def join(device: int = -1) -> int:
    """Take part in the other ranks' work with zeros, until all ranks have joined; for a rank out of data.

    With a DistributedOptimizer the other ranks may use it meanwhile, and no other collective. Its Average still divides
    by the number of all ranks. Without one they may call `allreduce` and its variants over all ranks, on the CPU, with
    Sum or Average; other collectives raise an error on them.

    Args:
        device: No effect.

    Returns:
        The rank that joined last; the highest if there are several.

    Raises:
        HorovodError: There are several DistributedOptimizers.
        HorovodInternalError: A rank has left.
    """
    number = next(_joins)
    if size() == 1:
        return 0
    if len(reducers) > 1:
        raise HorovodError(f"join(): expected at most one DistributedOptimizer, got {len(reducers)}")
    store = PrefixStore(f"ddpobs/join/{number}", dist.distributed_c10d._get_default_store())
    with _joined(), failures_as_internal_errors():
        if not reducers:
            return _join_calls(store)
        (reducer,) = reducers
        return _join_optimizer(reducer, store)


@contextmanager
def _joined() -> Iterator[None]:
    """Mark this rank as out of data: ranks that wait for it in another collective raise an error."""
    agreement.board().write(Entry(started=agreement.started(), joined=True))
    try:
        yield
    finally:
        agreement.board().write(Entry())
    agreement.settle()


def _join_optimizer(reducer: OptimizerReducer, store: PrefixStore) -> int:
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


# ---------------------------------------------------------------------- without an optimizer


def _join_calls(store: PrefixStore) -> int:
    _mark()
    if store.add("joined", 1) == size():
        store.set("last", str(rank()))
    pause_s = max(_PAUSE_S, _PAUSE_OF_A_RANK_S * size())
    while True:
        have_all_joined = store.check(["last"])
        if _take_part():
            continue
        if have_all_joined:
            break
        if (left := agreement.board().left(range(size()))) is not None:
            raise HorovodInternalError(f"join: rank {left} has left")
        time.sleep(pause_s)
    # A rank's mark shows what it has started, until all ranks have read it.
    if store.add("read", 1) == size():
        store.set("end", "")
    store.wait(["end"])
    return int(store.get("last"))


def _mark() -> Agreement:
    """Write this rank's place among the collectives of all ranks."""
    agreement.settle()
    agreed = agreement.of(global_process_set)
    agreement.board().write(Entry(started=agreement.started(), joined=True, zeros_in=agreed.key))
    return agreed


def _take_part() -> bool:
    """Take part in the collective in which other ranks wait, or refuse it; return whether there was one."""
    agreed = agreement.of(global_process_set)
    if agreement.board().verdict(agreed.key) is None:
        facts = agreed.awaited()
        if facts is None:
            return False
        if (zeros := _zeros_of(facts)) is not None:
            with suppress(MismatchError, HorovodError):  # The ranks that wait raise it.
                for handle in start_allreduce(**zeros):
                    handle.wait()
        else:
            agreement.board().judge(_refusal(agreed, facts))
    _mark()
    return True


def _zeros_of(facts: Facts) -> dict[str, Any] | None:
    """The arguments of an all-reduce, with zeros; None for a collective in which zeros would change the result."""
    settings = dict(facts["settings"])
    compression = _COMPRESSORS.get(settings.get("compression", ""))
    if facts["kind"] not in ("allreduce", "grouped_allreduce") or settings["op"] not in (Sum, Average):
        return None
    if compression is None:
        return None
    before, after = literal_eval(settings["factors"])
    tensors = [
        torch.zeros(literal_eval(shape), dtype=getattr(torch, dtype), device="cuda" if on_gpu else "cpu")
        for _, dtype, shape, on_gpu in facts["tensors"]
    ]
    return {
        "function": facts["kind"],
        "tensors": tensors,
        "name": facts["name"],
        "op": settings["op"],
        "prescale_factor": before,
        "postscale_factor": after,
        "compression": compression,
    }


def _refusal(agreed: Agreement, facts: Facts) -> Verdict:
    entries = agreement.board().entries(agreed.ranks).values()
    has_started = any(entry.started.get(agreed.key, 0) > agreed.started for entry in entries)
    return Verdict(
        [agreed.key],
        f"{summary(facts)} was called, but rank {rank()} is out of data, in join: meanwhile the other ranks may only "
        "call allreduce and grouped_allreduce, with Sum or Average. Call other collectives before join",
        has_started,
    )
