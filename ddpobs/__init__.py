"""An instrumented DistributedDataParallel that shows where each millisecond of a training step goes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpobs import trackers
    from ddpobs.attaching import attach
    from ddpobs.client.client import Client
    from ddpobs.config import TelemetryConfig
    from ddpobs.ddp import DistributedDataParallel
    from ddpobs.reducer.layer_drop import LayerDrop
    from ddpobs.telemetry import current_run

__version__ = "0.1.0"
__all__ = [
    "Client",
    "DistributedDataParallel",
    "LayerDrop",
    "TelemetryConfig",
    "__version__",
    "attach",
    "current_run",
    "trackers",
]

_MODULES = {
    "Client": "ddpobs.client.client",
    "DistributedDataParallel": "ddpobs.ddp",
    "LayerDrop": "ddpobs.reducer.layer_drop",
    "TelemetryConfig": "ddpobs.config",
    "attach": "ddpobs.attaching",
    "current_run": "ddpobs.telemetry",
}
"""Module of each public name, imported on first use."""


def __getattr__(name: str) -> Any:
    """Resolve public names on first use, so that a collector without torch can import ddpobs."""
    if name == "trackers":
        return import_module("ddpobs.trackers")
    if name not in _MODULES:
        raise AttributeError(f"module 'ddpobs' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the public names alone."""
    return sorted(__all__)
