"""Start of a command under `ddpobs run`: the command as a child, and this process becomes its supervisor.

The command starts first, and this process is then replaced by a Python without ddpobs' libraries, which needs a quarter
of the memory. All signals are blocked meanwhile, and wait for the supervisor.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import ddpobs
from ddpobs.launch.output import Output
from ddpobs.launch.witness import Witness
from ddpobs.ranks.run_name import new_launch
from ddpobs.recording.place.place_file import LAUNCH, PLACES

NOT_STARTED = 127
"""Exit status of a command that cannot be started, as a shell's."""
_PR_SET_PDEATHSIG = 1
_SET_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores from its start; a command expects their default action."""


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    own_environ: Mapping[str, str],
    places: Path,
    fail: Callable[[str], object],
    *,
    keep_output: bool = True,
) -> NoReturn:
    """Start a command and supervise it; this process ends as the command does.

    Args:
        command: The program and its arguments.
        environ: The command's environment.
        own_environ: The environment in which the supervisor reports ranks.
        places: Folder in which the ranks leave their places.
        fail: Called in the child if the program cannot be started, with the reason.
        keep_output: Whether a report of a failure may have the last lines of the command's stderr.
    """
    launch, parent = new_launch(), os.getpid()
    end_with_parent = ending_with(parent)
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    witness = Witness.begin()
    output, stderr = Output.begin(keep=keep_output)
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        output.give(stderr)
        _become(command, {**environ, LAUNCH: launch, PLACES: str(places)}, before, fail)
    supervisor = Path(__file__).with_name("supervisor.py")
    root = Path(ddpobs.__file__).parents[1]
    # Neither `site` nor the folder of the script: the supervisor uses the standard library and the format of places.
    python = [sys.executable, "-S", "-s", "-P", str(supervisor)]
    arguments = [
        str(pid),
        str(root),
        str(places),
        launch,
        ",".join(str(int(number)) for number in before),
        Path(script_of(command)).stem,
        output.hand_over(),
        *witness.hand_over(),
    ]
    os.execve(sys.executable, [*python, *arguments], dict(own_environ))


def run_plain(command: Sequence[str], fail: Callable[[str], object]) -> NoReturn:
    """Become the command itself, without telemetry; `fail` as for `supervise`."""
    _become(command, os.environ, signal.pthread_sigmask(signal.SIG_BLOCK, ()), fail)


def script_of(command: Sequence[str]) -> str:
    """Return the script in a command, or the program."""
    return next((word for word in command if word.endswith(".py")), command[0])


def ending_with(parent: int) -> Callable[[], object]:
    """Return a function that makes this process end with its parent, whatever ends that; loads its library before."""
    if sys.platform != "linux":
        return lambda: None
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        # SIGTERM and not SIGKILL: a launcher then ends its ranks, which else would go on without it.
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(NOT_STARTED)

    return end_with_parent


def _become(
    command: Sequence[str],
    environ: Mapping[str, str],
    mask: set[signal.Signals] | set[int],
    fail: Callable[[str], object],
) -> NoReturn:
    """Replace this process by the command."""
    try:
        for number in _SET_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        fail(f"{command[0]}: {error.strerror}")
    finally:
        os._exit(NOT_STARTED)
