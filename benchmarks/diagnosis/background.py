"""A random load beside a training, as other programs on a host make it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MODES = {"none": (), "bursts": ((0.03, 0.3),), "busy": ((0.1, 0.2), (0.1, 0.2)), "long bursts": ((0.5, 2.0),)}
"""By name, for each process the mean seconds for which it computes, and for which it sleeps."""
_SCRIPT = """
import os, random, sys, time
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
    draw = random.Random(seed)
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", _SCRIPT, str(busy), str(idle), str(draw.randrange(10**6)), str(os.getpid())]
        )
        for busy, idle in MODES[mode]
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
