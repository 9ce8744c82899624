"""The cost of telemetry that a run's ranks measured."""

from __future__ import annotations

from collections.abc import Sequence

from ddpobs import wire
from ddpobs_server.analysis.account.rank_account import Process


def own_cost(processes: Sequence[Process]) -> tuple[int, wire.TelemetryCost] | None:
    """Return the first rank that measured the cost, and the cost; None if none did.

    All ranks rest in the same steps and wait for each other in each, so that each rank measures the cost for all.
    """
    for process in sorted(processes, key=lambda process: process.rank):
        if process.account is not None and process.account.telemetry is not None:
            return process.rank, process.account.telemetry
    return None
