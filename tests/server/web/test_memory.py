"""The arenas of the C library, counted in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_ARENAS = """
import ctypes, os, sys, threading
from ddpobs_server.web import memory

if sys.argv[1] == "limited":
    memory.limit_arenas()
met = threading.Barrier(8)
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p

def take():
    libc.malloc(1000)
    met.wait()

threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc has no arenas to limit")
@pytest.mark.parametrize(("how", "one"), [("limited", True), ("plain", False)])
def test_all_threads_take_memory_from_one_arena(how: str, one: bool) -> None:
    printed = subprocess.run([sys.executable, "-c", _ARENAS, how], capture_output=True, text=True, check=True).stdout
    assert (printed.count("<heap nr=") == 1) is one
