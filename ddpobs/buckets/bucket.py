"""A bucket: parameters that are reduced together. Their gradients are views of one flat buffer."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from ddpobs import wire
from ddpobs.buckets.gradient_memory import GradientMemory, views_of

COPY_ON_ARRIVAL_ELEMENTS = 4_096
"""Mean parameter size (elements) from which gradients are copied into the bucket as they arrive, while still in cache.
Smaller gradients are copied together when the bucket is full, in fewer calls."""


class Bucket:
    """Parameters that are reduced together.

    `slot` is a parameter's position in its bucket.

    Attributes:
        index: Position in launch order.
        members: Indices of the parameters among all of the module's.
        parameters: The same parameters.
        memory: Owns `buffer`, `head` and `views`, and follows their use in user code.
        buffer: The flat buffer, one dimension.
        head: Its first element, as a tensor of at most one element.
        views: Each parameter's part of the buffer, in the parameter's own shape and strides.
        elements: Length of the buffer.
        pending: Number of gradients that have not arrived in this backward.
        copies_on_arrival: Gradients are copied in one by one, as they arrive.
        copied: By slot, whether that has happened in this backward.
        residual: The part of this bucket's sums that a lossy strategy has yet to send, flat as the buffer; or None.
        sparse: The bucket holds the one sparse gradient of its one parameter, and has no buffer.
        grads_are_views: `.grad` becomes the view. Otherwise it stays autograd's own tensor, and `write_back` copies the
            result into it.
        casts: The buffer has another dtype than the parameters.
        keeps_graph: This backward records the graph of its gradients, which a view of the buffer would not have.
    """

    __slots__ = (
        "_as_views",
        "_divisor",
        "_factor",
        "_were_views",
        "buffer",
        "casts",
        "copied",
        "copies_on_arrival",
        "elements",
        "grads_are_views",
        "head",
        "index",
        "keeps_graph",
        "members",
        "memory",
        "parameters",
        "pending",
        "residual",
        "sparse",
        "views",
    )

    def __init__(
        self, index: int, members: list[int], parameters: list[torch.nn.Parameter], sparse: bool, as_views: bool
    ) -> None:
        self.index, self.members, self.parameters, self.sparse = index, members, parameters, sparse
        self.pending = len(members)
        self.grads_are_views, self.casts, self.keeps_graph = True, False, False
        self.residual: torch.Tensor | None = None
        self._divisor: float | None = None
        self._factor: torch.Tensor | None = None
        self._as_views, self._were_views = as_views, True
        self.copied = bytearray(len(members))
        self._allocate(parameters[0].dtype)
        self.copies_on_arrival = self._has_large_gradients

    # ------------------------------------------------------------------ memory

    def _allocate(self, dtype: torch.dtype) -> None:
        self.memory = GradientMemory(self.parameters, dtype, self.sparse, self._as_views)
        self.buffer, self.head, self.views = self.memory.buffer, self.memory.head, self.memory.views
        self.elements = self.buffer.numel()

    def reallocate_if_held(self) -> None:
        """Take fresh memory if user code still holds a gradient of the last backward."""
        if not self.memory.is_held():
            return
        old_views = self.views
        self._allocate(self.buffer.dtype)
        for slot, (parameter, gradient) in enumerate(zip(self.parameters, old_views, strict=True)):
            if parameter.grad is gradient:
                self.memory.take_over(slot, gradient)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Reduce in `dtype` instead of the parameters' own; `write_back` converts the result."""
        self.grads_are_views, self.casts = False, True
        self._allocate(dtype)

    @property
    def _has_large_gradients(self) -> bool:
        return not self.sparse and self.elements >= COPY_ON_ARRIVAL_ELEMENTS * len(self.members)

    def keep_graph(self) -> None:
        """Leave each `.grad` and its graph to autograd in this backward, and reduce copies when the bucket is full."""
        self._were_views = self.grads_are_views
        self.keep_grads_separate()
        self.keeps_graph, self.copies_on_arrival = True, False

    def keep_grads_separate(self) -> None:
        """Leave each `.grad` as autograd made it from now on, and reduce a copy of it."""
        if not self.grads_are_views or self.sparse:
            return
        self.grads_are_views = False
        old_views = self.views
        self._allocate(self.buffer.dtype)
        for view, old_view, copied in zip(self.views, old_views, self.copied, strict=True):
            if copied:
                view.copy_(old_view)

    @property
    def holds_gradients(self) -> bool:
        """Whether some `.grad` is in the buffer."""
        return any(p.grad is view for p, view in zip(self.parameters, self.views, strict=False))

    def parts_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a flat tensor with the buffer's layout."""
        return views_of(flat, self.parameters, as_views=True)

    # ------------------------------------------------------------------ gradients into the buffer

    @property
    def divisor(self) -> float | None:
        """Number by which gradients are divided as they are copied in; None for no division."""
        return self._divisor

    @divisor.setter
    def divisor(self, divisor: float | None) -> None:
        if divisor != self._divisor:
            self._divisor = divisor
            # A Python number would become a tensor at each call, which takes as long as to multiply 1,000 elements. A
            # tensor without dimensions counts as a number for the result's dtype. The device is named because a
            # `with torch.device(...)` of the user's changes the default.
            self._factor = None if divisor is None else torch.tensor(1 / divisor, dtype=torch.float64, device="cpu")

    def copy_in(self, slot: int, parameter: torch.Tensor) -> None:
        """Copy one gradient into the buffer, divided in the same pass, and make `.grad` the view of it."""
        gradient, view, factor = parameter.grad, self.views[slot], self._factor
        if gradient is None:  # A custom function returned none; `fill` decides when it is certain for all passes.
            return
        if factor is None or gradient is view or not gradient.dim():
            if gradient is view and view.data_ptr() != self.memory.pointers[slot]:  # A hook of the user's replaced it.
                self.memory.restore_views()
                view = self.views[slot]
            self._copy_in_two_passes(gradient, view)
        else:
            torch.mul(gradient, factor, out=view)
        if self.grads_are_views:
            parameter.grad = view
        self.copied[slot] = 1

    def _copy_in_two_passes(self, gradient: torch.Tensor, view: torch.Tensor) -> None:
        if gradient is not view:
            view.copy_(gradient)
        if gradient is view and self._as_views:
            self._divide([], [view])
        else:
            self._divide([view], [])

    def _set_result(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Give a `.grad` to a parameter that was reached but got none, as from a custom function that returns None."""
        parameter.grad = view if self.grads_are_views else torch.zeros_like(parameter)

    def fill(self, used: Sequence[int] = ()) -> None:
        """Copy every gradient in that has not been copied on arrival, divided, and make `.grad` the view of it.

        A gradient that autograd accumulated in place is there already. A parameter without a gradient counts as zero
        and keeps having none, unless it was reached. A sparse gradient is coalesced and stays where it is.

        Args:
            used: By index of all parameters, whether each was reached; empty for none.
        """
        if 0 not in self.copied:
            return
        if self.sparse:
            self._fill_sparse()
            return
        self.memory.restore_views()
        gradients: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        in_place: list[torch.Tensor] = []
        for parameter, view, done, member in zip(self.parameters, self.views, self.copied, self.members, strict=True):
            if done:
                continue
            gradient = parameter.grad
            (in_place if gradient is view and self._as_views else copied).append(view)
            if gradient is None:
                view.zero_()
                if used and used[member]:
                    self._set_result(parameter, view)
            elif gradient is not view:
                gradients.append(gradient)
                targets.append(view)
                if self.grads_are_views:
                    parameter.grad = view
        if gradients:
            torch._foreach_copy_(targets, gradients)
        self._divide(copied, in_place)

    def _divide(self, copied: list[torch.Tensor], in_place: list[torch.Tensor]) -> None:
        """Divide views as torch's DDP does, to the last bit: a division by 3 is not a multiplication by 1/3.

        Args:
            copied: Views of gradients that torch copies into its bucket, times the reciprocal.
            in_place: Views of gradients that torch finds in its bucket, and divides.
        """
        divisor = self._divisor
        if divisor is None:
            return
        if len(copied) == len(self.views):
            self.buffer.mul_(1 / divisor)
        elif len(in_place) == len(self.views):
            self.buffer.div_(divisor)
        else:
            for view in in_place:
                view.div_(divisor)
            for view in copied:  # One call for all of them would first round the number to their own precision.
                view.mul_(1 / divisor)

    def _fill_sparse(self) -> None:
        (parameter,) = self.parameters
        gradient = parameter.grad if parameter.grad is not None else no_rows(parameter)
        gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
        # Divide before coalescing, as torch does: a row that occurs twice is then a sum of quotients.
        parameter.grad = (gradient if self._divisor is None else gradient / self._divisor).coalesce()

    # ------------------------------------------------------------------ results out of it

    def write_back(self, result: torch.Tensor, except_for: Container[int] = ()) -> None:
        """Copy each parameter's part of the result into its `.grad`, which has the parameter's dtype.

        Args:
            result: The reduced buffer, or a tensor in its place.
            except_for: Indices of parameters that hold an older gradient.
        """
        for parameter, part, member in zip(self.parameters, self.parts_of(result), self.members, strict=True):
            if parameter.grad is not None and member not in except_for:
                parameter.grad.copy_(part)

    def assign_grad(self, slot: int) -> None:
        """Make the result the gradient of a parameter that got none in this backward."""
        parameter = self.parameters[slot]
        if self.sparse:
            return
        if self.grads_are_views or self.casts:
            parameter.grad = self.views[slot]
        elif parameter.grad is None:
            parameter.grad = self.views[slot].clone()
        else:
            parameter.grad.copy_(self.views[slot])

    def carry_residual(self, slot: int, old_bucket: Bucket, old_slot: int) -> None:
        """Take over one parameter's part of the residual of the bucket that held it before."""
        assert old_bucket.residual is not None
        if self.residual is None:
            self.residual = torch.zeros_like(self.buffer)
        self.parts_of(self.residual)[slot].copy_(old_bucket.parts_of(old_bucket.residual)[old_slot])

    def return_residual(self, slot: int, ranks: int) -> None:
        """Return this rank's share of an unused sum to the residual, from which the sum came."""
        if self.residual is not None:
            share = self.views[slot] / ranks
            self.parts_of(self.residual)[slot].add_(share.nan_to_num_(0, 0, 0))

    def reset(self) -> None:
        """Prepare for the next backward."""
        self.pending = len(self.members)
        self.copied[:] = bytes(len(self.copied))
        if self.keeps_graph:
            self.keeps_graph, self.grads_are_views = False, self._were_views
            self.copies_on_arrival = self._has_large_gradients
        if self.memory.never_exposed:
            self.memory.update_exposed()

    def describe(self, names: Sequence[str]) -> wire.Bucket:
        """The bucket in its wire form; `names` are of all parameters, by index."""
        return describe(self.parameters, [names[member] for member in self.members])


def describe(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> wire.Bucket:
    """The wire form of a bucket of these parameters."""
    described = [wire.Parameter(name=name, size=p.numel()) for name, p in zip(names, parameters, strict=True)]
    return wire.Bucket(
        size_bytes=sum(p.numel() * p.element_size() for p in parameters),
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        parameters=described,
    )


def build(
    parameters: Sequence[torch.nn.Parameter],
    assignment: Sequence[Sequence[int]],
    expect_sparse: Sequence[bool],
    as_views: bool = False,
) -> list[Bucket]:
    """The buckets of an assignment, with zeroed buffers.

    Args:
        parameters: All of the module's.
        assignment: Indices of each bucket's parameters, in launch order.
        expect_sparse: By parameter, whether its gradient is sparse.
        as_views: Autograd may see gradients as views of a bucket.
    """
    return [
        Bucket(index, list(members), [parameters[m] for m in members], expect_sparse[members[0]], as_views)
        for index, members in enumerate(assignment)
    ]


def zeros_like(bucket: Bucket) -> Bucket:
    """A bucket of zeros with the same shape, for a rank that takes part without gradients."""
    parameters = bucket.parameters
    if bucket.sparse:
        parameters = [torch.nn.Parameter(torch.empty_like(parameters[0]))]
        parameters[0].grad = no_rows(parameters[0])
    zeros = Bucket(bucket.index, bucket.members, parameters, bucket.sparse, as_views=True)
    if not bucket.grads_are_views:
        zeros.set_dtype(bucket.buffer.dtype)
    return zeros


def no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """A sparse gradient that is zero everywhere."""
    rows = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(rows, parameter.new_zeros((0, *parameter.shape[1:])), parameter.shape)
