"""A collector with a wall clock that another process sets: `python stepped_clock.py FILE`.

The file holds the clock's offset in ns, as eight bytes. Retention runs every second, so that it meets each step.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

_SIZE = 8


def set_offset(file: Path, offset_ns: int) -> None:
    """Set the clock of the collector that has this file."""
    with file.open("r+b" if file.exists() else "wb") as output:
        output.write(offset_ns.to_bytes(_SIZE, "little", signed=True))


def follow(file: Path) -> None:
    """Add the file's offset to this process's wall clock."""
    with file.open("rb") as source:
        offset = mmap.mmap(source.fileno(), _SIZE, access=mmap.ACCESS_READ)
    true_ns = time.time_ns
    time.time_ns = lambda: true_ns() + int.from_bytes(offset[:_SIZE], "little", signed=True)
    time.time = lambda: time.time_ns() / 1e9


def main() -> None:
    """Run the collector."""
    follow(Path(sys.argv.pop(1)))
    # Imported with the new clock: some functions are bound at import.
    from ddpobs_server import app
    from ddpobs_server.operations import retention

    retention._PERIOD_S = 1.0
    app.main()


if __name__ == "__main__":
    main()
