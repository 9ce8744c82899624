"""A random load beside a training, as other programs on a host make it: the same on each processor."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MODES = {"none": (0.0, 1.0), "short bursts": (0.003, 0.03), "bursts": (0.02, 0.2), "long bursts": (0.2, 2.0)}
"""By name, the mean seconds for which a process on each processor computes, and for which it sleeps."""
_SCRIPT = """
import os, random, sys, time
os.sched_setaffinity(0, [int(sys.argv[5])])
busy_s, idle_s, draw = float(sys.argv[1]), float(sys.argv[2]), random.Random(int(sys.argv[3]))
while os.getppid() == int(sys.argv[4]):
    until = time.thread_time() + draw.expovariate(1 / busy_s)
    while time.thread_time() < until:
        sum(range(9999))
    time.sleep(draw.expovariate(1 / idle_s))
"""


@contextmanager
def background(mode: str, seed: int) -> Iterator[None]:
    """Run the load of a mode; it ends with the context, or with this process."""
    draw, (busy_s, idle_s) = random.Random(seed), MODES[mode]
    options = [str(busy_s), str(idle_s)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", _SCRIPT, *options, str(draw.randrange(10**6)), str(os.getpid()), str(number)]
        )
        for number in (sorted(os.sched_getaffinity(0)) if busy_s else ())
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
