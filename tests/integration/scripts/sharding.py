"""Accelerate's FSDP2 on CPUs."""

from __future__ import annotations

from accelerate.state import DistributedType, PartialState


def choose_by_plugin() -> None:
    """Let Accelerate follow an FSDP plugin on CPUs as on GPUs, where alone it does; all else runs as it is."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
