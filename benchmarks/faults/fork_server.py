"""Forks processes from one that has imported their modules: ranks with torch, which saves two seconds a rank.

A rank, or a collector, is a process of its own with its own interpreter, environment and log. Its script runs as
`__main__`, and it ends as an interpreter does, with its exit handlers. `ForkServer.start` returns what
`subprocess.Popen` returns, as far as tests need it.

The server reads a request from each line of its input, and writes a line when a rank has started and when it has ended.
At the end of its input it ends, and the ranks with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import IO, Any

PRELOADED = ("numpy", "torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "torch.utils.data")
_POLL_S = 0.02


class ForkedRank:
    """A process that the server has forked, and its number there."""

    def __init__(self, server: ForkServer, number: int, pid: int) -> None:
        self._server = server
        self._number = number
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.status(self._number)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        deadline = time.monotonic() + (timeout or float("inf"))
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported modules and forks others. It ends with this process. Threads may share it.

    Args:
        environ: Its own environment.
        preloaded: Names of the modules.
    """

    def __init__(self, environ: Mapping[str, str], preloaded: Sequence[str] = PRELOADED) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environ),
            bufsize=0,
        )
        self._ended: dict[int, int] = {}
        self._unread = b""

    def start(
        self,
        script: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        log: Path,
        namespaces: Sequence[str] = (),
    ) -> ForkedRank:
        """Fork a process that runs a script.

        Args:
            script: The script and its arguments.
            environ: The whole environment of the process.
            folder: Its working folder.
            log: The file for its output and errors.
            namespaces: Files of the namespaces that it enters.
        """
        request = {"script": list(script), "environ": dict(environ), "folder": str(folder), "log": str(log)}
        request["namespaces"] = list(namespaces)
        with self._lock:
            self._pipe("stdin").write(json.dumps(request).encode() + b"\n")
            while True:
                for answer in self._answers(wait=True):
                    if "pid" in answer:
                        return ForkedRank(self, answer["number"], answer["pid"])

    def close(self) -> None:
        """End the server, and with it every rank that still runs."""
        self._pipe("stdin").close()
        self._pipe("stdout").close()
        self._process.wait()

    def status(self, number: int) -> int | None:
        """The exit status of a process that has ended, as `Popen.returncode` has it."""
        with self._lock:
            if number not in self._ended:
                self._answers(wait=False)
            return self._ended.get(number)

    def _answers(self, wait: bool) -> list[dict[str, int]]:
        output = self._pipe("stdout")
        os.set_blocking(output.fileno(), wait)
        data = output.read(1 << 16)
        if data == b"":
            raise RuntimeError(f"the fork server ended with status {self._process.wait()}")
        *lines, self._unread = (self._unread + (data or b"")).split(b"\n")
        answers = [json.loads(line) for line in lines]
        self._ended.update((answer["number"], answer["status"]) for answer in answers if "status" in answer)
        return answers

    def _pipe(self, name: str) -> IO[bytes]:
        pipe: IO[bytes] = getattr(self._process, name)
        return pipe


def serve() -> dict[str, Any]:
    """Fork a process for each line of the input. Returns the request, in the forked process only.

    Processes are numbered: within a session the system gives the pid of one that has ended to another.
    """
    running: dict[int, int] = {}
    numbers, unread = count(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            if selector.select(_POLL_S if running else None):
                data = os.read(0, 1 << 20)
                if not data:
                    for pid in running:
                        with suppress(ProcessLookupError):  # Its session begins a moment after its fork.
                            os.killpg(pid, signal.SIGKILL)
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    pid = os.fork()
                    if not pid:
                        return dict(json.loads(line))
                    running[pid] = next(numbers)
                    _answer(number=running[pid], pid=pid)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _answer(number=running.pop(pid), status=os.waitstatus_to_exitcode(status))


def _answer(**fields: int) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


def become(request: dict[str, Any]) -> ModuleType:
    """Take over environment, folder, output and arguments of a request, in a session of its own.

    Returns the empty module `__main__`.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    for name in request["namespaces"]:
        _enter(name)
    null, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.argv = request["script"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    main = ModuleType("__main__")
    main.__file__ = sys.argv[0]
    sys.modules["__main__"] = main
    return main


def _enter(namespace: str) -> None:
    # os.setns comes with Python 3.12.
    descriptor = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", namespace)
    os.close(descriptor)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        __import__(each)
    gc.freeze()  # Otherwise each process copies the memory of all modules at its end, to look for garbage: 0.6 s.
    script = become(serve())
    exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), vars(script))
