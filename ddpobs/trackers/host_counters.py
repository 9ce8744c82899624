"""Counters of a run's hosts, as the ranks' last heartbeats have them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

MAX_HOSTS = 64
"""Maximum number of hosts: those of the lowest ranks."""
_COUNTERS: dict[str, tuple[str, Callable[[Iterable[float]], float], float]] = {
    "busy_ratio": ("busy_permille", max, 1e-3),
    "steal_ratio": ("steal_permille", max, 1e-3),
    "load": ("load_milli", max, 1e-3),
    "throttled_seconds": ("throttled_ns", max, 1e-9),
    "memory_available_bytes": ("available_bytes", min, 1),
    "memory_resident_bytes": ("resident_bytes", sum, 1),
    "device_busy_ratio": ("device_busy_permille", fmean, 1e-3),
    "device_clock_mhz": ("device_clock_mhz", min, 1),
    "device_memory_used_bytes": ("device_used_bytes", sum, 1),
}
"""Field of `wire.Machine`, how the ranks of a host are combined, and its unit in that of the counter."""
_NOT_IN_NAMES = re.compile(r"[^\w.-]")


def host_counters(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return `host/HOST/COUNTER` of each host; without those that its system does not report.

    `device_slowdowns` counts the ranks whose device lowers its clock.

    Args:
        ranks: Ranks as `Run.ranks` returns them.
    """
    latest = {row["rank"]: row for row in sorted(ranks, key=lambda row: row["last_seen_ns"])}
    machines: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for _, row in sorted(latest.items()):
        if row["host"] and row["pulse"] and row["pulse"]["machine"]:
            machines[row["host"]].append(row["pulse"]["machine"])
    counters = {}
    for host in list(machines)[:MAX_HOSTS]:
        name = f"host/{_NOT_IN_NAMES.sub('_', host)}"
        for counter, (field, combined, unit) in _COUNTERS.items():
            if values := [machine[field] for machine in machines[host] if machine[field] is not None]:
                counters[f"{name}/{counter}"] = combined(values) * unit
        if any(machine["device_clock_mhz"] is not None for machine in machines[host]):
            slowed = sum(bool(machine["device_slowdowns"]) for machine in machines[host])
            counters[f"{name}/device_slowdowns"] = slowed
    return counters
