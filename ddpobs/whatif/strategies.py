"""What communication computes on processors, and what a strategy moves and computes, by its name in `comm=`.

`benchmarks/whatif/` measures the times. They hold for gloo on processors; on other devices they count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyCost:
    """Bytes and computation of a strategy.

    Attributes:
        payload: Bytes that it moves, as a share of float32's.
        launch_ns: Computation on the training thread before the transfer, per byte of float32.
        transfer_ns: Computation during the transfer beyond that of float32, per byte of float32.
        messages: Latencies of a transfer.
    """

    payload: float = 1.0
    launch_ns: float = 0.0
    transfer_ns: float = 0.0
    messages: int = 1


STRATEGY_COSTS = {
    "all_reduce": StrategyCost(),
    "fp16": StrategyCost(payload=0.5, launch_ns=0.05, transfer_ns=0.45),
    "bf16": StrategyCost(payload=0.5, launch_ns=0.05, transfer_ns=0.2),
    "int8": StrategyCost(payload=0.254, launch_ns=0.4, transfer_ns=0.8, messages=2),
}
"""Strategies whose bytes follow from the gradients' alone. gloo sums float16 without vector instructions."""

HOST_NS = 0.25
"""Part of a byte's time that no link makes shorter: copies and sums."""
CONTENTION_NS = 3.0
"""Computation that a training thread on a processor loses while a byte moves beside it."""
