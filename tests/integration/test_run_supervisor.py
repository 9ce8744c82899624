"""`ddpobs run` as a parent that nobody notices: signals, exit statuses, streams and job control, without a training."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rig import patience
from tests.support.integration.run_command import command
from tests.support.integration.tools import need

LOGGING = """
import os, signal, sys
FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
DEFAULT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP, *FAULTS}
signals = signal.valid_signals() - DEFAULT
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", os.getpid(), flush=True)
while (arrived := signal.sigwaitinfo(signals)).si_signo != signal.SIGRTMAX:
    print(int(arrived.si_signo), flush=True)
"""
FORWARDED = [
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGWINCH, signal.SIGALRM, signal.SIGPIPE, signal.SIGABRT, signal.SIGTTIN, signal.SIGRTMIN),
]


@contextmanager
def running(code: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield the process of `ddpobs run` and the process number of its command, which has printed it."""
    process = subprocess.Popen(**command("-c", code), stdout=subprocess.PIPE, **options)
    pid = int(line(process).split()[1])
    try:
        yield process, pid
    finally:
        process.kill()
        with suppress(ProcessLookupError):  # It may block the SIGTERM that it gets now.
            os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def state_of(pid: int) -> str:
    """State of a process in /proc; empty without it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def wait_until(states: str, *pids: int) -> None:
    deadline = time.monotonic() + patience.HANG_S
    while any(state_of(pid) not in [*states] for pid in pids):
        assert time.monotonic() < deadline, [state_of(pid) for pid in pids]
        time.sleep(0.02)


@pytest.mark.parametrize("status", [0, 1, 255])
def test_the_exit_status_is_the_command_s(status: int) -> None:
    done = subprocess.run(**command("-c", f"raise SystemExit({status})"), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT])
def test_it_dies_by_the_command_s_signal(number: int) -> None:
    code = f"import os, signal; signal.signal({number}, 0) if {number} != 9 else 0; os.kill(os.getpid(), {number})"
    done = subprocess.run(**command("-c", code), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "")


def test_a_signal_to_it_alone_reaches_the_command_once() -> None:
    with running(LOGGING) as (process, _):
        for number in FORWARDED:
            process.send_signal(number)
            assert line(process) == f"{int(number)}\n"
        process.send_signal(signal.SIGRTMAX)
        assert (process.wait(patience.HANG_S), process.stdout.read() if process.stdout else None) == (0, "")


def test_a_signal_to_the_whole_group_reaches_the_command_once() -> None:
    with running(LOGGING, start_new_session=True) as (process, _):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.killpg(process.pid, number)
            assert line(process) == f"{int(number)}\n"
        process.send_signal(signal.SIGUSR1)
        assert line(process) == f"{int(signal.SIGUSR1)}\n"
        process.send_signal(signal.SIGRTMAX)
        assert (process.wait(patience.HANG_S), process.stdout.read() if process.stdout else None) == (0, "")


def test_a_signal_that_was_ignored_before_stays_ignored() -> None:
    code = (
        "import os, signal; print('ready', os.getpid(), flush=True); "
        "print(int(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN), flush=True)"
    )
    ignoring = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with running(code, preexec_fn=ignoring) as (process, _):
        assert (line(process), process.wait(patience.HANG_S)) == ("1\n", 0)


def test_a_broken_pipe_ends_the_command_as_in_a_shell() -> None:
    arguments = command()
    arguments["args"][-1:] = ["sh", "-c", "kill -PIPE $$; echo survived"]
    done = subprocess.run(**arguments, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGPIPE, "")


def test_the_end_of_the_command_s_output_is_seen_while_it_runs() -> None:
    with running("import os, time; print('ready', os.getpid(), flush=True); os.close(1); time.sleep(600)") as (run, _):
        assert line(run) == ""
        assert run.poll() is None


def test_a_kill_ends_the_command_by_sigterm() -> None:
    with running(LOGGING) as (process, _):
        process.kill()
        assert line(process) == f"{int(signal.SIGTERM)}\n"


def test_it_stops_and_goes_on_with_the_command() -> None:
    with running(LOGGING, process_group=0) as (process, pid):  # SIGTSTP has no effect in an orphaned process group.
        os.kill(pid, signal.SIGSTOP)
        wait_until("T", pid, process.pid)
        process.send_signal(signal.SIGCONT)
        wait_until("S", pid, process.pid)
        process.send_signal(signal.SIGTSTP)
        wait_until("T", pid, process.pid)
        process.send_signal(signal.SIGCONT)
        wait_until("S", pid, process.pid)


def start_job() -> None:
    """Run `ddpobs run` as an interactive shell runs a job, and continue it whenever it has stopped."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        for number in (signal.SIGTTOU, signal.SIGTSTP):
            signal.signal(number, signal.SIG_DFL)
        arguments = command("-c", LOGGING)
        os.execvpe(arguments["args"][0], arguments["args"], arguments["env"])
    status = os.waitpid(job, os.WUNTRACED)[1]
    while os.WIFSTOPPED(status):
        os.write(1, b"job stopped\n")  # pytest captures `print`.
        os.killpg(job, signal.SIGCONT)
        status = os.waitpid(job, os.WUNTRACED)[1]
    os._exit(os.waitstatus_to_exitcode(status))


def test_a_terminal_s_signals_reach_the_command_once() -> None:
    """The terminal sends them to the whole foreground group: Ctrl-C, Ctrl-\\, a new size, Ctrl-Z."""
    shell, terminal = pty.fork()
    if shell == 0:
        start_job()
    try:
        screen = b""

        def wait_for(text: str) -> None:
            nonlocal screen
            while text.encode() not in screen:
                assert select.select([terminal], [], [], patience.HANG_S)[0], screen
                screen += os.read(terminal, 1024)

        wait_for("ready ")
        wait_for("\r\n")
        os.write(terminal, b"\x03")
        wait_for(f"^C{int(signal.SIGINT)}\r\n")
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
        wait_for(f"\n{int(signal.SIGWINCH)}\r\n")
        os.write(terminal, b"\x1a")
        wait_for("job stopped\r\n")
        os.write(terminal, b"\x1c")
        wait_for(f"^\\{int(signal.SIGQUIT)}\r\n")
        child = int(screen.split()[1])
        os.kill(child, signal.SIGRTMAX)
        assert os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1]) == 0
        logged = [int(number) for number in re.findall(rb"(\d+)\r\n", screen)]
        assert logged == [child, signal.SIGINT, signal.SIGWINCH, signal.SIGQUIT]
    finally:
        with suppress(OSError):
            os.kill(shell, signal.SIGKILL)
        os.close(terminal)


ORPHANS = """
import os, subprocess, sys, time
orphan = subprocess.check_output(["sh", "-c", "sleep 0.1 >&2 & echo $!"], text=True).strip()
deadline = time.monotonic() + 60
while os.path.exists(f"/proc/{orphan}") and time.monotonic() < deadline:
    time.sleep(0.02)
states = [open(f"/proc/{p}/stat").read().rpartition(")")[2].split()[0] for p in os.listdir("/proc") if p.isdigit()]
print(states.count("Z"), flush=True)
os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [0, signal.SIGKILL])
def test_as_process_1_of_a_container_it_collects_orphans(number: int) -> None:
    unshare = [need("unshare", "util-linux"), "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("process namespaces need root")
    arguments = command("-c", ORPHANS, number)
    arguments["args"] = [*unshare, *arguments["args"]]
    done = subprocess.run(**arguments, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (128 + number if number else 0, "0\n"), done.stderr


def test_it_needs_little_memory() -> None:
    with running(LOGGING) as (process, _):
        deadline = time.monotonic() + patience.HANG_S
        while "supervisor.py" not in Path(f"/proc/{process.pid}/cmdline").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        assert line(process) == f"{int(signal.SIGUSR1)}\n"
        (resident,) = (
            row for row in Path(f"/proc/{process.pid}/status").read_text().splitlines() if row.startswith("VmHWM")
        )
        assert int(resident.split()[1]) < 40_000
