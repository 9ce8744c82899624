"""Telemetry for a model that torch itself parallelises, whichever way."""

from __future__ import annotations

from typing import Any

from ddpobs.attachment import Attachment
from ddpobs.attachment import attach as attach_ddp
from ddpobs.config import TelemetryConfig
from ddpobs.deepspeed import EngineAttachment, is_engine
from ddpobs.deepspeed import attach as attach_engine
from ddpobs.fsdp import FullyShardedAttachment
from ddpobs.fsdp import attach as attach_fully_sharded
from ddpobs.torch_seam.fully_shard import is_fully_sharded


def attach(
    model: Any, telemetry: bool | str | TelemetryConfig | None = True
) -> Attachment | FullyShardedAttachment | EngineAttachment | None:
    """Give a model of torch's DDP or FSDP2, or a DeepSpeed engine, the telemetry of ours.

    The result of training stays the same to the bit.

    Args:
        model: A `torch.nn.parallel.DistributedDataParallel`, the root module that `fully_shard` was applied to, or the
            engine of `deepspeed.initialize`. Attach before its first forward, so that no bucket is missed.
        telemetry: As on `ddpobs.DistributedDataParallel`; None follows the environment.

    Returns:
        The attachment, whose `detach()` removes the telemetry; the same object if the model is attached already. None
        with telemetry off, where it cannot start, and for ddpobs' own DDP, which takes `telemetry=` itself.

    Raises:
        DataParallelError: The model is a `torch.nn.DataParallel`.
        DdpobsError: The model is none of them.
        ConfigError: A setting has an invalid value.
    """
    if is_engine(model):
        return attach_engine(model, telemetry)
    return (attach_fully_sharded if is_fully_sharded(model) else attach_ddp)(model, telemetry)
