"""Buckets and settings of torch's reducer, and the stamps of one of its reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpobs import wire
from ddpobs.buckets import assignment
from ddpobs.torch_seam.bucket_caps import BucketCaps
from ddpobs.torch_seam.interpreter_exit import stay_in_interpreter


class Reduction:
    """Stamps of one synchronised backward; completions may arrive after its end."""

    def __init__(self, buckets: int) -> None:
        self.launched_ns: list[Any] = [0] * buckets
        self.done_ns: list[Any] = [0] * buckets
        self.works: dict[int, Any] = {}
        self.launches = 0
        """Launched all-reduces, including those whose size matches no bucket."""
        self.next_bucket = 0
        self.used_map: torch.Tensor | None = None

    def launch(self, launched: Any, fits: Callable[[int], bool]) -> int | None:
        """Stamp the launch of the next bucket that fits, and return its index; None if no bucket does."""
        self.launches += 1
        index = next((i for i in range(self.next_bucket, len(self.launched_ns)) if fits(i)), None)
        if index is not None:
            self.next_bucket = index + 1
            self.launched_ns[index] = launched
        return index

    def stamper(self, index: int, now: Callable[[], Any]) -> Callable[[Any], None]:
        """Return the callback of a bucket's completion."""
        done_ns = self.done_ns

        def stamp(_: Any) -> None:
            done_ns[index] = now()
            stay_in_interpreter()

        return stamp


def current_layout(
    model: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], sparse: Sequence[bool]
) -> list[list[int]]:
    """Indices of each bucket's parameters, from torch's log of rebuilt buckets or from its first assignment.

    Returns no bucket if parameters were frozen or unfrozen since the model was wrapped: torch's reducer still has the
    parameters of that time.
    """
    facts = model._get_ddp_logging_data()
    if facts["num_parameter_tensors"] != len(parameters):
        return []
    if facts.get("rebuilt_per_bucket_param_indices"):
        return [[int(i) for i in b.split()] for b in facts["rebuilt_per_bucket_param_indices"].split(",")]
    limits = BucketCaps.of(model).first_step(
        static_graph=model.static_graph, find_unused_parameters=model.find_unused_parameters
    )
    return assignment.assign(parameters, limits, sparse)


def real_numbers(tensor: torch.Tensor) -> int:
    """Real numbers in a tensor. Torch reduces complex buckets as real numbers; a hook may reduce them as they are."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def reducer_settings(model: DistributedDataParallel) -> dict[str, wire.Scalar]:
    """Settings of torch's reducer that matter for a diagnosis."""
    return {
        "reducer": "torch",
        "find_unused_parameters": model.find_unused_parameters,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "static_graph": model.static_graph,
        "broadcast_buffers": model.broadcast_buffers,
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
    }
