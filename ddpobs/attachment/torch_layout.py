"""Buckets and settings of torch's reducer, and the stamps of one of its reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpobs import wire
from ddpobs.buckets import assignment
from ddpobs.buckets import bucket as bucketing
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


class TorchBuckets:
    """The buckets of torch's reducer; none until they are known.

    Args:
        parameters: The parameters that torch's reducer reduces.
        names: Their names.
        rebuilds: Torch still has to rebuild its buckets, before the second forward.
        skips: A flag makes torch skip buckets without a used parameter.

    Attributes:
        members: Indices of each bucket's parameters, in launch order.
        rebuilds: As the argument.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str], *, rebuilds: bool, skips: bool
    ) -> None:
        self._parameters, self._names, self._skips = parameters, names, skips
        self.rebuilds = rebuilds
        self.members: list[list[int]] = []
        self._elements: list[int] = []
        self._order: list[int] | None = None

    def set(self, members: list[list[int]]) -> None:
        """Replace the buckets."""
        self.members = members
        self._elements = [sum(real_numbers(self._parameters[i]) for i in bucket) for bucket in members]

    def take_broadcast(self, values: list[int]) -> bool:
        """Take one of the two broadcasts of a rebuild; return whether the rebuild is complete.

        The first holds the parameters' indices in their new order and the number of buckets, the second the number of
        parameters in each bucket.
        """
        if self._order is None:
            self._order = values[:-1]
            return False
        order, self._order = iter(self._order), None
        self.rebuilds = False
        self.set([[next(order) for _ in range(count)] for count in values])
        return True

    def holds(self, bucket: int, elements: int) -> bool:
        """Whether the bucket has so many elements."""
        return self._elements[bucket] == elements

    def is_reduced(self, bucket: int, is_used: Callable[[Sequence[int]], bool]) -> bool:
        """Whether torch reduces the bucket; `is_used` judges its parameters' indices."""
        return not self._skips or is_used(self.members[bucket])

    def describe(self) -> list[wire.Bucket]:
        """The buckets for the wire."""
        parameters, names = self._parameters, self._names
        return [bucketing.describe([parameters[i] for i in b], [names[i] for i in b]) for b in self.members]


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
        "compiled_buckets": bool(getattr(model, "_use_python_reducer", False)),
    }
