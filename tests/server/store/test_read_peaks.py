"""Memory of the largest reads, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.rig import patience

ROOT = Path(__file__).resolve().parents[3]
READ = """
import re, sys
from pathlib import Path
from ddpobs import wire
from ddpobs_server.store import Arrival, Store
from tests.support.server.batches import ATTEMPT, batch, steps

def peak_bytes():
    return 1000 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

store = Store(f"sqlite:///{sys.argv[1]}/runs.db")
store.migrate()
for seq in range(50):
    sent = batch("run", seq, steps=steps(12_000 * seq, 12_000))
    store.ingest([Arrival(wire.decode(wire.encode(sent)), bytes([seq]), 1, 1)])
before = peak_bytes()
rank, columns = store.steps("run", ATTEMPT)
assert len(rank) == 600_000
print((peak_bytes() - before) / columns.table.nbytes)
"""
MAX_TIMES = 1.85
"""Peak of a read relative to its columns. They take their size once, besides the blocks and the order."""


def test_a_read_of_columns_takes_their_size_once(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")])}
    done = patience.run([sys.executable, "-c", READ, str(tmp_path)], environ=os.environ | paths)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < MAX_TIMES
