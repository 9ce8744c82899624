"""Settings of one reducer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpobs.reducer.dropped_layers import NO_LAYERS, DropPlan


@dataclass(frozen=True)
class Settings:
    """Choices of a front end, fixed at construction.

    Attributes:
        first_limits_bytes: Bucket limits before the order of gradients is known.
        rebuilt_limits_bytes: Bucket limits afterwards.
        find_unused: Parameters may take no part in a backward.
        skip_unused: Buckets that no rank uses are not reduced.
        static_graph: The same parameters take part in every backward.
        drops: The layers that each step leaves out; `find_unused` finds their parameters like others.
        missing_as_zero: A parameter without a gradient counts as zero.
        as_views: Gradients may be views of the buckets, which the next backward overwrites, as with
            `gradient_as_bucket_view`. Otherwise a gradient that user code still holds keeps its memory.
        assignment: Indices of each bucket's parameters, in launch order; None to fill buckets by size.
        tunes_buckets: Try other buckets during training, and keep those that prove to be faster.
        ends_with_engine: The engine's last callback ends a backward. Otherwise the front end calls `finish`.
    """

    first_limits_bytes: Sequence[int]
    rebuilt_limits_bytes: Sequence[int]
    find_unused: bool = False
    skip_unused: bool = False
    static_graph: bool = False
    drops: DropPlan = NO_LAYERS
    missing_as_zero: bool = False
    as_views: bool = False
    assignment: Sequence[Sequence[int]] | None = None
    tunes_buckets: bool = False
    ends_with_engine: bool = True
