"""Telemetry for modules that torch's own DistributedDataParallel wraps."""

from __future__ import annotations

from ddpobs.attachment.attachment import Attachment, attach

__all__ = ["Attachment", "attach"]
