"""`.grad` of the parameters that a backward leaves out.

| parameter | older gradient | `.grad` afterwards |
|---|---|---|
| unused on every rank | none | none |
| unused on every rank | present | unchanged, the same tensor |
| unused on this rank, used on another | any | the reduced gradient |
| required, but missing (a fault) | present | unchanged |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.buckets.layout import Layout
from ddpobs.comm import Pending, SkippedBucket
from ddpobs.observers import ModuleObserver
from ddpobs.reducer.dropped_layers import DropPlan


class UnusedParameters:
    """Keeps older gradients while a backward runs, and settles them at its end.

    Args:
        layout: The parameters and their buckets.
        recorder: Receives the names of unused parameters; None with telemetry off.
        drops: The parameters of dropped layers are not reported: nothing is wrong with them.

    Attributes:
        stashed: By index of a parameter that takes no part, its older gradient.
        size_bytes: Size of the parameters that this rank left out of its last backward.
        graph_static: Every backward of this rank has left out the same parameters so far.
        recorder: As given.
    """

    def __init__(self, layout: Layout, recorder: ModuleObserver | None, drops: DropPlan) -> None:
        self._layout, self.recorder, self._drops = layout, recorder, drops
        self._previous: list[int] | None = None
        self.stashed: dict[int, torch.Tensor] = {}
        self.size_bytes = 0
        self.graph_static = True

    def stash(self, unreached: Sequence[int], used: Sequence[int]) -> None:
        """Keep older gradients of parameters that take no part.

        Args:
            unreached: Indices of the parameters.
            used: By parameter, whether it was reached since the last synchronised backward.
        """
        layout = self._layout
        for index in unreached:
            bucket, gradient = layout.bucket_of[index], layout.parameters[index].grad
            if gradient is not None and not used[index] and not bucket.sparse:
                view = bucket.views[layout.index_in_bucket[index]]
                self.stashed[index] = gradient.clone() if gradient is view else gradient

    def restore(self, bucket: Bucket) -> None:
        """Return the kept gradients of a bucket that has been filled."""
        for member in bucket.members:
            if member in self.stashed:
                self._layout.parameters[member].grad = self.stashed[member]

    def settle(self, locally: list[int], globally: list[int], pending: Sequence[Pending], ranks: int) -> None:
        """Set `.grad` of parameters that another rank used.

        Args:
            locally: Indices of the parameters unused on this rank.
            globally: Indices of the parameters unused on every rank.
            pending: The communications of this backward, in bucket order.
            ranks: Number of ranks.
        """
        layout = self._layout
        parameters = [layout.parameters[index] for index in locally]
        self.graph_static = self.graph_static and self._previous in (None, locally)
        self._previous = locally
        self.size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        for index in globally:
            if not isinstance(pending[layout.bucket_of[index].index], SkippedBucket):
                layout.bucket_of[index].return_residual(layout.index_in_bucket[index], ranks)
        for index in sorted(set(locally) - set(globally)):
            layout.bucket_of[index].assign_grad(layout.index_in_bucket[index])
        if self.recorder is not None:
            names, dropped = layout.names, self._drops.dropped
            found = [[names[i] for i in indices if names[i] not in dropped] for indices in (locally, globally)]
            self.recorder.unused(*found)

    def report_missing(self, parameters: dict[str, list[int]], group: dist.ProcessGroup) -> None:
        """Record missing parameters; `parameters` holds by name the ranks without its gradient."""
        if self.recorder is not None:
            globally = [name for name, ranks in parameters.items() if len(ranks) == group.size()]
            self.recorder.unused([name for name, ranks in parameters.items() if group.rank() in ranks], globally)

    def forget(self) -> None:
        """The backward is over."""
        self.stashed = {}
