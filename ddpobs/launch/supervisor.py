"""The parent of a command under `ddpobs run`: passes on signals, reports killed ranks, and ends as the command does.

It runs as a script of its own, with the standard library alone. All signals stay blocked and are read one by one:

| signal | action |
|---|---|
| from the kernel (Ctrl-C, Ctrl-Z, a closed or resized terminal) | none: the terminal sent it to the command too |
| from a process, to this one | sent to the command |
| from a process, to the whole group | none: the command got it too (`witness.py`) |
| a child stopped | this process stops too, so that the shell sees a stopped job; at SIGCONT both go on |
| a child ended | collected, also an orphan's end if this is process 1 of a container |
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_SI_KERNEL = 0x80
"""`si_code` of a signal that the kernel sent, a terminal's for example (sigaction(2))."""
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
_EACH_S = 0.02
"""Time in which a sender reaches one process of a job after the other."""
_REPORT_S = 10.0
"""Longest wait for the report of killed ranks after the command has ended."""


class Supervisor:
    """Supervises one command.

    Args:
        pid: Process number of the command.
        ranks: Watches and reports the ranks of this launch.
        witness: Shows which signals the whole process group got.
        output: The command's stderr.
    """

    def __init__(self, pid: int, ranks: Ranks, witness: Witness, output: Output) -> None:
        self._pid, self._ranks, self._witness, self._output = pid, ranks, witness, output
        self._status: int | None = None

    def run(self) -> int:
        """Wait for the end of the command; returns its status as `os.waitpid` does."""
        signals = signal.valid_signals() - _FAULTS
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._collect()
        while self._status is None:
            arrived = signal.sigwaitinfo(signals)
            if arrived.si_signo == signal.SIGCHLD:
                self._collect()
            else:
                self._pass_on(arrived)
        self._finish(signals)
        return self._status

    def _pass_on(self, arrived: signal.struct_siginfo) -> None:
        if arrived.si_signo == signal.SIGINT:
            self._ranks.note_interrupt()
        if arrived.si_code != _SI_KERNEL:
            time.sleep(_EACH_S)
        if not self._witness.saw(arrived.si_signo) and arrived.si_code != _SI_KERNEL:
            with suppress(OSError):
                os.kill(self._pid, arrived.si_signo)

    def _collect(self) -> None:
        """Collect the children that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                if pid == self._pid:
                    os.kill(os.getpid(), signal.SIGSTOP)
            elif pid == self._pid:
                self._status = status
            else:
                self._ranks.reported(pid)
                self._witness.ended(pid)

    def _finish(self, signals: set[signal.Signals]) -> None:
        """Report the ranks that were killed, or else the failure of the command; a signal ends the wait."""
        until = time.monotonic() + _REPORT_S
        self._output.finish()
        self._ranks.finish(self._pid, os.waitstatus_to_exitcode(self._status or 0))
        while self._ranks.reports and (left_s := until - time.monotonic()) > 0:
            arrived = signal.sigtimedwait(signals, left_s)
            if arrived is not None and arrived.si_signo != signal.SIGCHLD and arrived.si_code != _SI_KERNEL:
                return
            self._collect()


def end_as(status: int) -> NoReturn:
    """End this process as the one with that status ended, by the same signal for example."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # The command has left its own.
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # Process 1 of a container does not end by its own signal.
    os._exit(os.waitstatus_to_exitcode(status))


def _after_check(checked: int | None, status: int) -> int:
    """Return the status of a launch whose hosts were to be checked: that of a slow host goes before the command's."""
    if VARIABLE in os.environ and checked is None:
        reason = "no rank was started: torchrun, mpiexec or the variable RANK makes a process a rank"
        print(f"ddpobs: hosts are not compared, because {reason}", file=sys.stderr, flush=True)  # noqa: T201
    return SLOW_HOST << 8 if checked == SLOW_HOST else status


def _explain(ranks: Ranks, status: int) -> None:
    """Print why a command that used torch and succeeded has no run."""
    is_quiet = os.environ.get("DDPOBS_QUIET", "").strip() == "1" or VARIABLE in os.environ
    if status == 0 and not is_quiet and ranks.saw_no_model():
        reason = "no process wrapped a model in DistributedDataParallel or fully_shard, or gave it to ddpobs.attach"
        print(f"ddpobs: no telemetry: {reason}", file=sys.stderr, flush=True)  # noqa: T201


def _let_go_of_streams(kept: list[int]) -> None:
    """Keep stderr and these: a reader of the command's output must see its end when the command closes it."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    first = 3
    for descriptor in sorted(kept):
        os.set_inheritable(descriptor, False)
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, max(first + 1, min(65536, os.sysconf("SC_OPEN_MAX"))))


def main(  # noqa: PLR0917
    pid: str, root: str, places: str, launch: str, mask: str, script: str, stderr: str, *witness: str
) -> NoReturn:
    """Supervise the command with that process number; the arguments are `start.supervise`'s."""
    witness_pid, *pipe = map(int, witness)
    kept = int(stderr.partition(":")[0])
    _let_go_of_streams([*pipe, *([kept] if kept >= 0 else [])])
    output = Output.taken_over(stderr)
    blocked = {int(number) for number in mask.split(",") if number}
    ranks = Ranks(Path(places), Launch(launch, script, root, blocked), output.last)
    status = 0
    try:
        status = Supervisor(int(pid), ranks, Witness(witness_pid, (pipe[0], pipe[1])), output).run()
        status = _after_check(ranks.checked(), status)
        _explain(ranks, status)
    except Exception as error:
        print(f"ddpobs: the command is no longer supervised: {error!r}", file=sys.stderr, flush=True)  # noqa: T201
        status = os.waitpid(int(pid), 0)[1]
        output.finish()
    finally:
        ranks.close()
        output.leave_behind()
    end_as(status)


if __name__ == "__main__":
    sys.path.append(sys.argv[2])
    from ddpobs.launch.host_check.order import SLOW_HOST, VARIABLE
    from ddpobs.launch.output import Output
    from ddpobs.launch.ranks import Launch, Ranks
    from ddpobs.launch.witness import Witness

    main(*sys.argv[1:])
