"""An instrumented DistributedDataParallel that tells where every millisecond of a training step went."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpobs.attachment.attachment import attach
    from ddpobs.config import TelemetryConfig
    from ddpobs.ddp import DistributedDataParallel

__version__ = "0.1.0"
__all__ = ["DistributedDataParallel", "TelemetryConfig", "attach"]

_HOME = {
    "DistributedDataParallel": "ddpobs.ddp",
    "TelemetryConfig": "ddpobs.config",
    "attach": "ddpobs.attachment",
}


def __getattr__(name: str) -> Any:
    """Resolve public names on first use, so that a collector without torch can import ddpobs."""
    if name not in _HOME:
        raise AttributeError(f"module 'ddpobs' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
