"""What half the bytes gain on other links, predicted from launches with telemetry on one."""

from __future__ import annotations

from typing import Any

from benchmarks.paper.experiments import LINKS_GBPS
from benchmarks.paper.predictions import together
from benchmarks.paper.tables import place
from benchmarks.tables import rows_of

_BASE = "float32, 0.5 MB"


def table(results: dict[str, Any]) -> str:
    """Return a row for each model and link of a prediction: its batches with float32 and float16, and their ratio."""
    rows = []
    for setting, found in results["settings"].items():
        whole, half = (together(found[_BASE], line) for line in ("float32", "float16"))
        for gbps, before, after in zip(LINKS_GBPS, whole, half, strict=True):
            cells = ["{:.2f} ({:.2f} to {:.2f})".format(*times) for times in (before, after)]
            rows.append([place(setting), f"{gbps:g} Gbit/s", *cells, f"{after[0] / before[0]:.2f}"])
    head = ["measured with", "predicted for", "float32, s a batch", "float16, s a batch", "float16, of float32"]
    return rows_of(head, rows)
