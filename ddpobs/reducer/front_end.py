"""The methods that a front end adds to the reduction of a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import Pending
from ddpobs.reducer.fault_broadcast import Fault


class FrontEnd:
    """Called once per backward or once per bucket, never per parameter. Every default but `divisor` adds nothing.

    The methods stand in the order in which the reducer calls them.
    """

    def check_backward(self) -> None:
        """Prepare for a backward that begins.

        Raises:
            ReducerError: The backward cannot be reduced; then it never began.
        """

    def divisor(self) -> float | None:
        """Number by which gradients are divided on their way into a bucket; None for no division."""
        raise NotImplementedError

    def arrival_callbacks(self) -> list[Callable[[int], None]]:
        """Functions to call with a parameter's index as its gradient arrives in this backward. Empty as a rule."""
        return []

    def first_launch(self) -> None:
        """The first bucket of this backward is about to be launched."""

    def bucket_launched(self, bucket: Bucket, pending: Pending) -> None:
        """A bucket was handed to its strategy."""

    def backward_ended(self) -> None:
        """The engine has run this backward. The method calls `Reducer.launch_rest`, and then `finish`."""

    def explain(self, fault: Fault) -> Fault:
        """Replace a fault by its cause, if that is known."""
        return fault

    def write_results(self, late: Sequence[Bucket]) -> None:
        """Every bucket holds its result, and so do the buckets of `late` parameters, which join the others next.

        Unused parameters are settled afterwards.
        """

    def parameters_added(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """These parameters joined the layout, behind the others."""

    def reset(self) -> None:
        """The backward is over, or was aborted."""
