"""`run`: calls a function on ranks that it starts on this host, as `horovod.run` does."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpobs.errors import HorovodError
from ddpobs.launch.early_failure import report_early

_THIS_HOST = ("localhost", "127.0.0.1")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    verbose: Any = None,
) -> list[Any]:
    """Start ranks on this host with torch's elastic agent, call a function on each, and return the results by rank.

    The ranks import the calling script anew: a script calls this inside of `if __name__ == "__main__":`.

    Args:
        func: Calls `init` itself. Importable by name, as multiprocessing requires it.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks.
        np: Horovod's older name of `num_proc`.
        hosts: `localhost:SLOTS`, or None.
        use_gloo: No effect.
        use_mpi: Must not be true.
        verbose: No effect.

    Raises:
        HorovodError: Other hosts, MPI, or no number of ranks.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: A rank failed.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ranks = num_proc or np
    others = [host for host in (hosts or "").split(",") if host and host.split(":")[0] not in _THIS_HOST]
    if not ranks or ranks < 1:
        raise HorovodError(f"run(): expected num_proc of at least 1, got {ranks}")
    if others or use_mpi:
        raise HorovodError(
            "run() starts ranks on this host, with gloo or NCCL: for other hosts or MPI, use "
            "`ddpobs horovodrun -np N -H HOSTS --mpi python train.py`"
        )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
    )
    results = elastic_launch(config, _call)(func, tuple(args), dict(kwargs or {}))
    return [results[rank] for rank in range(ranks)]


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return func(*args, **kwargs)
    except Exception as error:
        report_early(error)
        raise
