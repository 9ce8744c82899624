"""A run on a link of known speed, sent to a collector."""

from __future__ import annotations

from typing import Any

from tests.support.analysis.link_scenario import Run
from tests.support.server.batches import batch, hello, put

MB = 10**6
RUN = Run(sizes=[4 * MB, MB], ready_ms=[5.0, 10.0])
"""40 ms of bytes a step on a link of 1 Gbit/s."""


def send(url: str, name: str, run: Run) -> None:
    evidence = run.evidence()
    columns: Any = evidence.columns
    for rank in range(run.ranks):
        rows = evidence.steps.select(evidence.rank == rank)
        spans = columns._spans.select(columns._rank == rank)
        put(url, batch(name, rank=rank, hello=hello(f"node{rank}"), layouts=[run.layout()], steps=rows, spans=spans))
