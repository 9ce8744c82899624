"""Telemetry for modules that torch's FSDP2 (`fully_shard`) shards."""

from __future__ import annotations

from ddpobs.fsdp.attachment import FullyShardedAttachment, attach

__all__ = ["FullyShardedAttachment", "attach"]
