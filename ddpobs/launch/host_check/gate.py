"""A rank waits for the check of the hosts before its script begins; with the standard library alone.

The check is a process of its own, so that the script finds no library loaded, no memory used and no group joined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from ddpobs.launch.host_check.order import MIN_REPETITIONS, SLOW_HOST, VARIABLE, Order, note
from ddpobs.recording.place.early_place import rank_of, remove

_CHECK = "import sys; sys.path.append(sys.argv.pop(1)); from ddpobs.launch.host_check.check import main; main()"
_PACKAGE = Path(__file__).parents[2]
_EXTRA_S = 300.0
"""Time for the start, for connections, and for operations of a slow host that outlast their window."""


def pass_check(environ: MutableMapping[str, str]) -> None:
    """Check the hosts together with all ranks; ends this process if one is slow.

    Under torchrun the exit status is then 0: another one would make torchrun start the ranks again. The supervisor of
    the launch knows better.
    """
    status = _status(environ)
    is_noted = note(environ, is_slow=status == SLOW_HOST)
    if status == SLOW_HOST:
        remove(environ)
        os._exit(0 if is_noted and "TORCHELASTIC_RUN_ID" in environ else SLOW_HOST)
    environ.pop(VARIABLE)  # A training that the script starts is not checked again.


def _status(environ: MutableMapping[str, str]) -> int:
    """Run the check; prints the reason if the hosts are not compared."""
    order, (rank, ranks) = Order.of(environ), rank_of(environ) or (0, 1)
    if reason := _reason_against(order, ranks):
        if rank == 0:
            _print(reason)
        return 0
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path) != _PACKAGE / "autoload"]
    child = {**environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-c", _CHECK, str(_PACKAGE.parent)]
    limit_s = 2 * order.seconds + _EXTRA_S
    try:
        status = subprocess.run(command, env=child, stdin=subprocess.DEVNULL, check=False, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        _print(f"the check of rank {rank} did not end within {limit_s:.0f} s")
        return 0
    except OSError as error:
        _print(f"the check of rank {rank} did not start: {error}")
        return 0
    if status not in (0, SLOW_HOST):
        end = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        _print(f"the check of rank {rank} {end}")
    return status


def _reason_against(order: Order, ranks: int) -> str:
    """Why nothing is measured; empty if the hosts can be compared."""
    if ranks == 1:
        return "one rank has none to be compared with"
    if order.repetitions < MIN_REPETITIONS:
        return (
            f"{order.repetitions} repetitions of each measure fit into {order.seconds:g} s, and at least "
            f"{MIN_REPETITIONS} are needed: raise --seconds"
        )
    return ""


def _print(reason: str) -> None:
    print(f"ddpobs: hosts are not compared, because {reason}", file=sys.stderr, flush=True)  # noqa: T201
