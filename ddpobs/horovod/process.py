"""Ranks and process sets: the participants of a collective."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from operator import index
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from ddpobs.comm.side_groups import timeout_of
from ddpobs.errors import HorovodError
from ddpobs.horovod import agreement, environment, position, timeline
from ddpobs.horovod.calls import Call
from ddpobs.horovod.position import check_initialized, is_initialized, rank, size

_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which the launchers of Open MPI and of MPICH give the number of ranks."""

_created_group = False
_first_store: Store | None = None
"""The store of the first process group, in which later groups of this process meet after a reset."""
_meeting: tuple[tuple[str | None, ...], Store, Iterator[int]] | None = None
"""The launcher's address at which this process met the other ranks, the store there, and numbers for later groups."""
_resets = 0
_ELASTIC_TIMEOUT_S = 600.0


class ProcessSet:
    """A subset of the ranks with its own collectives; to be used after `init` or `add_process_set` has got it.

    Args:
        *ranks: The ranks, or one sequence of ranks; without any, all ranks.

    Attributes:
        agreement: Compares the ranks' collectives; None before the first.
        process_set_id: The set's number, the same on every rank and 0 for all ranks; None if the set is not added.
        mpi_comm: None: sets are made of ranks, not of communicators.

    Raises:
        HorovodError: The ranks are not numbers.
    """

    mpi_comm: None = None

    def __init__(self, *ranks: int | Iterable[int]) -> None:
        given = ranks[0] if len(ranks) == 1 and isinstance(ranks[0], Iterable) else ranks
        try:
            self._ranks: list[int] | None = sorted(map(index, given)) or None  # type: ignore[arg-type]
        except TypeError:
            raise HorovodError(
                f"ProcessSet: expected ranks, got {given!r}; an MPI communicator cannot be a process set"
            ) from None
        self.process_set_id: int | None = None if self._ranks else 0
        self._group: dist.ProcessGroup | None = None
        self.agreement: agreement.Agreement | None = None

    @property
    def ranks(self) -> list[int] | None:
        """The set's ranks in ascending order; of the set of all ranks, None before `init`."""
        if self._ranks is not None:
            return self._ranks
        return list(range(size())) if is_initialized() else None

    @property
    def group(self) -> dist.ProcessGroup:
        """The set's process group.

        Raises:
            HorovodError: `init` or `add_process_set` was not called, or this rank is not in the set.
        """
        check_initialized()
        if self._ranks is None:
            return self._group or dist.group.WORLD  # type: ignore[return-value]
        if not self.included():
            raise HorovodError(f"rank {rank()} is not in the process set {self.ranks}, and may not use it")
        if self._group is None:
            raise HorovodError(f"the process set {self.ranks} is unknown: call add_process_set with it on every rank")
        return self._group

    @group.setter
    def group(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def included(self) -> bool:
        """Whether this rank is in the set."""
        return self._ranks is None or rank() in self._ranks

    def size(self) -> int:
        """Number of ranks in the set."""
        return size() if self._ranks is None else len(self._ranks)

    def rank(self) -> int:
        """This rank's index in the set."""
        return self.group.rank()

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


global_process_set = ProcessSet()
"""All ranks."""
_sets: dict[int, ProcessSet] = {}
"""The sets that were added, by number."""


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None) -> None:
    """Connect to the other ranks; later calls do nothing.

    Uses torch's default process group if it exists. Otherwise creates it from the launcher's environment (RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun sets them), with NCCL for CUDA and gloo for the host. Under
    mpiexec the ranks are MPI's; without CUDA, MPI replaces gloo. Without any launcher there is one rank.

    Args:
        comm: The ranks to use, as a list or an MPI communicator; must be None or have all ranks.
        process_sets: Sets to add at once, or "dynamic". Horovod needs "dynamic" to add sets later; here it is always
            possible.

    Raises:
        HorovodError: `comm` has fewer ranks than the launcher has started, or two of the sets have the same ranks.
    """
    global _created_group  # noqa: PLW0603 - one Horovod a process, as it is in Horovod
    if is_initialized():
        return
    if not dist.is_initialized():
        _init_process_group()
        _created_group = True
        atexit.register(shutdown)
    _check_has_all_ranks(comm)
    agreement.connect()
    atexit.register(agreement.leave)
    position.find()
    try:
        for process_set in () if process_sets is None or process_sets == "dynamic" else process_sets:
            add_process_set(process_set)
    except HorovodError:
        _forget_sets()
        position.forget()
        raise
    environment.apply(os.environ)


def _check_has_all_ranks(comm: Any) -> None:
    if comm is None:
        return
    ranks = comm.Get_size() if hasattr(comm, "Get_size") else len(comm)
    if ranks != dist.get_world_size():
        raise HorovodError(
            f"init(comm=...): expected all {dist.get_world_size()} ranks that the launcher has started, got {ranks}: "
            "start fewer ranks, or use a ProcessSet"
        )


def _init_process_group() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        _meet_at_address(backend)
    elif any(int(os.environ.get(name, "1")) > 1 for name in _SIZES_OF_MPI):
        import ddpobs.mpi

        if not torch.cuda.is_available():
            backend = ddpobs.mpi.BACKEND
        dist.init_process_group(backend, init_method="mpi://")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _meet_at_address(backend: str) -> None:
    """Create the process group at the launcher's address; later ones of this process meet in the first one's store.

    Otherwise a fast rank would come into the old store of rank 0, which ends, or read old addresses from torchrun's.
    """
    global _meeting  # noqa: PLW0603 - one Horovod a process
    place = tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if _meeting is None or _meeting[0] != place:
        dist.init_process_group(backend)
        _meeting = place, dist.distributed_c10d._get_default_store(), count(1)
        return
    _, first, numbers = _meeting
    store = PrefixStore(f"ddpobs/init/{next(numbers)}", first)
    dist.init_process_group(
        backend, store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )


def shutdown() -> None:
    """Disconnect; destroys the process group if `init` created it."""
    global _created_group, _first_store
    atexit.unregister(shutdown)
    atexit.unregister(agreement.leave)
    timeline.stop_timeline()
    agreement.leave()
    if _created_group and dist.is_initialized():
        dist.destroy_process_group()
    _forget_sets()
    position.forget()
    _created_group, _first_store = False, None


def _forget_sets() -> None:
    for process_set in _sets.values():
        process_set.process_set_id = process_set._group = process_set.agreement = None
    _sets.clear()
    global_process_set._group = global_process_set.agreement = None


def reset() -> None:
    """Connect the same ranks anew, process sets included, after a collective has failed.

    The connections are closed first: ranks that still wait in a collective get an error, and come here too. They close
    with the last reference to their process group.

    Raises:
        HorovodError: A rank did not come within HOROVOD_ELASTIC_TIMEOUT (600 s).
    """
    global _first_store, _resets  # noqa: PLW0603 - one Horovod a process
    check_initialized()
    own_rank, ranks = dist.get_rank(), dist.get_world_size()
    agreement.leave()
    timeout = timeout_of(global_process_set.group, torch.device("cpu"))
    backend = dist.get_backend() if dist.get_backend() != "undefined" else dist.get_backend_config()
    _first_store = _first_store or dist.distributed_c10d._get_default_store()
    _resets += 1
    store = PrefixStore(f"ddpobs/reset/{_resets}", _first_store)
    for process_set in (global_process_set, *_sets.values()):
        process_set._group = process_set.agreement = None
    gc.collect()
    dist.destroy_process_group()
    _meet(store, own_rank, ranks)
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=ranks, timeout=timeout)
    agreement.connect()
    position.find()
    for _, process_set in sorted(_sets.items()):
        process_set._group = dist.new_group(process_set.ranks)


def _meet(store: Store, own_rank: int, ranks: int) -> None:
    timeout_s = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", _ELASTIC_TIMEOUT_S))
    store.set(f"came/{own_rank}", "")
    try:
        store.wait([f"came/{other}" for other in range(ranks)], timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [other for other in range(ranks) if not store.check([f"came/{other}"])]
        raise HorovodError(
            f"after a failed collective, ranks {', '.join(map(str, missing))} did not return within {timeout_s:.0f} s "
            "(HOROVOD_ELASTIC_TIMEOUT). torchrun with --max-restarts starts all ranks again if one of them ends"
        ) from None


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Create the set's process group. Every rank must call this, also ranks outside of the set.

    The set gets the lowest number that no other set has.

    Raises:
        HorovodError: `init` was not called, a rank of the set does not exist, or a set with these ranks exists.
    """
    created = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = created.ranks
    if not set(ranks or ()) <= set(range(size())):
        raise HorovodError(f"process set: expected ranks below {size()}, got {ranks}")
    for other in (global_process_set, *_sets.values()):
        if other.ranks == ranks:
            raise HorovodError(f"process set: {other} exists already")
    agreement.of(global_process_set).check(Call("add_process_set", settings=(("ranks", tuple(ranks or ())),)))
    created._group = dist.new_group(ranks)
    created.process_set_id = next(number for number in count(1) if number not in _sets)
    _sets[created.process_set_id] = created
    return created


def remove_process_set(process_set: ProcessSet) -> bool:
    """Destroy the set's process group; return whether there was one. The set of all ranks stays."""
    if process_set.process_set_id is None or _sets.get(process_set.process_set_id) is not process_set:
        return False
    del _sets[process_set.process_set_id]
    group, process_set._group, process_set.process_set_id = process_set._group, None, None
    process_set.agreement = None
    if process_set.included():
        dist.destroy_process_group(group)
    return True
