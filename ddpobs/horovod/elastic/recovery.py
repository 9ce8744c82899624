"""`run`: calls a training function again after a failed collective, from the last commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ddpobs.errors import HorovodInternalError, HostsUpdatedInterrupt, MismatchError
from ddpobs.horovod.broadcast import allgather_object, broadcast_object
from ddpobs.horovod.elastic.commit_file import CommitFile
from ddpobs.horovod.elastic.state import State
from ddpobs.horovod.optimizer import connect_all, disconnect_all
from ddpobs.horovod.position import rank
from ddpobs.horovod.process import reset


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is the `State`.

    Before the function begins, the state is that of the last commit of an earlier attempt, if there was any, and every
    rank takes over rank 0's. After a failed collective on any rank, all ranks restore their last commit, connect anew,
    call the state's reset callbacks, synchronize, and call the function again.

    Args:
        func: The function. It may be called several times, and has to go on where the state is.
    """

    @wraps(func)
    def trained(state: State, *args: Any, **kwargs: Any) -> Any:
        _load_earlier_attempt(state)
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                result = func(state, *args, **kwargs)
            except MismatchError:  # The script is wrong, and would be so again.
                raise
            except HorovodInternalError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            else:
                if (file := CommitFile.of_this_host()) is not None:
                    file.remove()
                return result
            optimizers = disconnect_all()
            reset()
            connect_all(optimizers)
            state.on_reset()

    return trained


def _load_earlier_attempt(state: State) -> None:
    """Give every rank the last commit of the attempts before, from a host that has it."""
    file = CommitFile.of_this_host()
    number, saved = (file.read() if file is not None else None) or (0, None)
    numbers: list[int] = allgather_object(number)
    latest = max(numbers)
    if latest == 0:
        return
    root = numbers.index(latest)
    state._load(broadcast_object(saved if rank() == root else None, root))
    state._commits = latest
