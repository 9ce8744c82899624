"""Telemetry for engines of DeepSpeed, with ZeRO of any stage."""

from __future__ import annotations

from ddpobs.deepspeed.attachment import EngineAttachment, attach, is_engine

__all__ = ["EngineAttachment", "attach", "is_engine"]
