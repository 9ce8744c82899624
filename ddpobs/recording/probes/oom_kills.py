"""The kernel's count of out-of-memory kills in this process's cgroup, of version 1 or 2."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def path() -> Path | None:
    """Return the file with the count; None if there is none that this process can read."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root, name = (_ROOT / "memory", "memory.oom_control") if controllers else (_ROOT, "memory.events")
            for folder in (root / group.lstrip("/"), root):  # In a container the group may be the root.
                if count(folder / name) is not None:
                    return folder / name
    return None


def count(file: Path | None) -> int | None:
    """Return the count in such a file; None if it is not readable."""
    if file is not None:
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in file.read_text().splitlines())
            return int(counts["oom_kill"]) if "oom_kill" in counts else None
    return None
