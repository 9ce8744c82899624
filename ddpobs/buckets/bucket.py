"""Parameters to buckets: one flat buffer each, gradients as views of it."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence

import torch

from ddpobs import wire

COPY_ON_ARRIVAL_ELEMENTS = 4_096
"""Elements of a bucket's parameters on average, from which each gradient goes into the bucket as soon as it is there,
still warm in the cache; between smaller ones little time passes, and they go together when the bucket is full, in
fewer calls."""


class Bucket:
    """Some parameters whose gradients are reduced together.

    Attributes:
        index: Its place in launch order.
        members: Indices of its parameters.
        buffer: The flat buffer, one dimension.
        elements: Of the buffer.
        head: The first of them, where there is one.
        views: Each parameter's part of the buffer, in the parameter's own shape and strides.
        pending: Parameters whose gradient this backward still owes.
        at_once: Gradients go in one by one, as they come.
        placed: By place in the bucket, whether the gradient did so in this backward.
        residual: What a lossy communication has yet to send of this bucket, flat as the buffer; None where it owes
            nothing.
        sparse: It holds the one sparse gradient of its one parameter; there is no buffer then.
        adopts: `.grad` becomes the view in the buffer; otherwise it stays what autograd made it.
        lent: It does so as another module reduces it too, and `write_back` brings the result.
    """

    __slots__ = (
        "_as_views",
        "_divisor",
        "_factor",
        "_never_exposed",
        "_pointers",
        "_references",
        "_storage",
        "_uses",
        "buffer",
        "copied",
        "copies_on_arrival",
        "elements",
        "grads_are_views",
        "head",
        "index",
        "members",
        "parameters",
        "pending",
        "residual",
        "shared_with_module",
        "sparse",
        "views",
    )

    def __init__(
        self, index: int, members: list[int], parameters: list[torch.nn.Parameter], sparse: bool, as_views: bool
    ) -> None:
        self.index, self.members, self.parameters, self.sparse = index, members, parameters, sparse
        self.pending = len(members)
        self.grads_are_views, self.shared_with_module = True, False
        self.residual: torch.Tensor | None = None
        self._divisor: float | None = None
        self._factor: torch.Tensor | None = None
        self._as_views = as_views
        first = parameters[0]
        self.copied = bytearray(len(members))
        self._allocate(first.dtype)
        self.copies_on_arrival = not sparse and self.elements >= COPY_ON_ARRIVAL_ELEMENTS * len(members)

    def _allocate(self, dtype: torch.dtype) -> None:
        self.elements = 0 if self.sparse else sum(p.numel() for p in self.parameters)
        self.buffer = torch.zeros(self.elements, dtype=dtype, device=self.parameters[0].device)
        self.head = self.buffer[:1]
        self.views = [] if self.sparse else _views(self.buffer, self.parameters, self._as_views)
        self._references = list(map(sys.getrefcount, self.views))
        self._pointers = list(map(torch.Tensor.data_ptr, self.views))
        self._storage = self.buffer.untyped_storage()._cdata
        self._uses = torch._C._storage_Use_Count(self._storage)
        self._never_exposed = set(range(len(self.views)))

    @property
    def divisor(self) -> float | None:
        """What gradients are divided by on their way in; None for nothing."""
        return self._divisor

    @divisor.setter
    def divisor(self, divisor: float | None) -> None:
        if divisor != self._divisor:
            self._divisor = divisor
            # Torch makes a tensor of a number at each call, which takes as long as to multiply a thousand elements. It
            # counts as a number beside whatever has dimensions, and on the host, wherever tensors are made by default.
            self._factor = None if divisor is None else torch.tensor(1 / divisor, dtype=torch.float64, device="cpu")

    def restore_views(self) -> None:
        """Make fresh views where `grad.data = ...` or `grad.set_(...)` led one to memory that nobody reduces.

        Each is asked, at 0.06 µs: the storage's uses do not tell, as who keeps the older gradient's data adds what the
        view took away.
        """
        if list(map(torch.Tensor.data_ptr, self.views)) == self._pointers:
            return
        for place, fresh in enumerate(_views(self.buffer, self.parameters, self._as_views)):
            if self.views[place].data_ptr() != self._pointers[place]:
                self.views[place] = fresh

    def reallocate_if_held(self) -> None:
        """Take fresh memory where someone still holds a gradient of the last backward and may read it yet.

        A gradient that autograd goes on accumulating into is no such case, nor is one that only `.grad` holds.
        """
        references = list(map(sys.getrefcount, self.views))
        shared = self.shared
        if not shared and references == self._references:
            return
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            # Nobody can hold a view that never was a gradient.
            rests = parameter.grad is not view and place not in self._never_exposed
            if rests and (shared or references[place] != self._references[place]):
                self._move()
                return

    @property
    def shared(self) -> bool:
        """Whether some tensor besides the gradients has their memory, as by `detach` and `data`."""
        return bool(torch._C._storage_Use_Count(self._storage) != self._uses)

    @property
    def holds_gradients(self) -> bool:
        """Whether some `.grad` is in the buffer."""
        return any(p.grad is view for p, view in zip(self.parameters, self.views, strict=False))

    def _move(self) -> None:
        older = self.views
        self._allocate(self.buffer.dtype)
        for place, (parameter, gradient) in enumerate(zip(self.parameters, older, strict=True)):
            if parameter.grad is gradient:
                self.take_over(place, gradient)

    def take_over(self, place: int, gradient: torch.Tensor) -> None:
        """Give a parameter's gradient its place here. As with torch's DDP it stays the tensor that the user knows."""
        view = self.views[place].copy_(gradient)
        if self._as_views:
            self.parameters[place].grad = view
        else:
            gradient.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
            self.views[place] = gradient
        self._never_exposed.discard(place)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Reduce in `dtype`, whatever the parameters' own is; `.grad` is then written by `write_back`."""
        self.grads_are_views = False
        self._allocate(dtype)

    def share_with_module(self) -> None:
        """Leave the gradients to another module as well, which needs them as autograd made them."""
        if not self.grads_are_views or self.sparse:
            return
        self.grads_are_views, self.shared_with_module = False, True
        older = self.views
        self._allocate(self.buffer.dtype)
        for view, former, placed in zip(self.views, older, self.copied, strict=True):
            if placed:
                view.copy_(former)

    def parts_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a flat tensor that stands in the buffer's place."""
        return _views(flat, self.parameters, as_views=True)

    def write_back(self, result: torch.Tensor, aside: Container[int] = ()) -> None:
        """Copy each parameter's part of the reduced buffer into its `.grad`, which has the parameter's dtype.

        Args:
            result: The reduced buffer, or what stands in its place.
            aside: Indices of parameters whose `.grad` is an older one.
        """
        for parameter, part, member in zip(self.parameters, self.parts_of(result), self.members, strict=True):
            if parameter.grad is not None and member not in aside:
                parameter.grad.copy_(part)

    def assign_grad(self, place: int) -> None:
        """Make the result the gradient of a parameter that got none in this backward."""
        parameter = self.parameters[place]
        if self.sparse:
            return
        if not self.shared_with_module:
            parameter.grad = self.views[place]
        elif parameter.grad is None:
            parameter.grad = self.views[place].clone()
        else:
            parameter.grad.copy_(self.views[place])

    def carry_residual(self, place: int, older: Bucket, place_there: int) -> None:
        """Take over what another bucket has yet to send of one parameter."""
        assert older.residual is not None
        if self.residual is None:
            self.residual = torch.zeros_like(self.buffer)
        self.parts_of(self.residual)[place].copy_(older.parts_of(older.residual)[place_there])

    def return_residual(self, place: int, ranks: int) -> None:
        """Take back this rank's share of a sum that nobody has a use for: it came of what had been owed."""
        if self.residual is not None:
            share = self.views[place] / ranks
            self.parts_of(self.residual)[place].add_(share.nan_to_num_(0, 0, 0))

    def reset(self) -> None:
        """Await the next backward."""
        self.pending = len(self.members)
        self.copied[:] = bytes(len(self.copied))
        if self._never_exposed:
            parameters, views = self.parameters, self.views
            self._never_exposed = {place for place in self._never_exposed if parameters[place].grad is not views[place]}

    def copy_in(self, place: int, parameter: torch.Tensor) -> None:
        """Bring one gradient into the buffer, divided in the same pass, and make `.grad` the view of it."""
        gradient, view, factor = parameter.grad, self.views[place], self._factor
        if factor is None or gradient is None or gradient is view or not gradient.dim():
            if gradient is view and view.data_ptr() != self._pointers[place]:  # By a hook of the user's, just now.
                self.restore_views()
                view = self.views[place]
            self._place_otherwise(gradient, view, parameter)
        else:
            torch.mul(gradient, factor, out=view)
        if self.grads_are_views and gradient is not None:
            parameter.grad = view
        self.copied[place] = 1

    def _place_otherwise(self, gradient: torch.Tensor | None, view: torch.Tensor, parameter: torch.Tensor) -> None:
        if gradient is None:
            view.zero_()
            self._answer(parameter, view)
            return
        if gradient is not view:
            view.copy_(gradient)
        if gradient is view and self._as_views:
            self._divide([], [view])
        else:
            self._divide([view], [])

    def _answer(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Give the result also to a parameter that was reached, and got nothing from a function of the user's own."""
        parameter.grad = view if self.grads_are_views else torch.zeros_like(parameter)

    def fill(self, used: Sequence[int] = ()) -> None:
        """Bring every gradient that is not placed yet into the buffer, divided, and make `.grad` the view of it.

        A gradient that autograd accumulated in place is there already. A parameter without one counts as zero and
        keeps having none, unless it was reached. A sparse gradient is coalesced and stays where it is.

        Args:
            used: By index of all parameters, whether each was reached; empty for none.
        """
        if 0 not in self.copied:
            return
        if self.sparse:
            self._fill_sparse()
            return
        self.restore_views()
        fresh: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for parameter, view, placed, member in zip(self.parameters, self.views, self.copied, self.members, strict=True):
            if placed:
                continue
            gradient = parameter.grad
            (kept if gradient is view and self._as_views else copied).append(view)
            if gradient is None:
                view.zero_()
                if used and used[member]:
                    self._answer(parameter, view)
            elif gradient is not view:
                fresh.append(gradient)
                places.append(view)
                if self.grads_are_views:
                    parameter.grad = view
        if fresh:
            torch._foreach_copy_(places, fresh)
        self._divide(copied, kept)

    def _divide(self, copied: list[torch.Tensor], kept: list[torch.Tensor]) -> None:
        """Divide views as torch's DDP does, to the last bit: by three is not times a third.

        Args:
            copied: Torch copies such gradients into its bucket, times the reciprocal.
            kept: These it finds there, and divides.
        """
        divisor = self._divisor
        if divisor is None:
            return
        if len(copied) == len(self.views):
            self.buffer.mul_(1 / divisor)
        elif len(kept) == len(self.views):
            self.buffer.div_(divisor)
        else:
            for view in kept:
                view.div_(divisor)
            for view in copied:  # One call for all of them would first round the number to their own precision.
                view.mul_(1 / divisor)

    def _fill_sparse(self) -> None:
        (parameter,) = self.parameters
        gradient = parameter.grad if parameter.grad is not None else no_rows(parameter)
        gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
        # Divided first, as torch does: a row that comes twice is a sum of quotients.
        parameter.grad = (gradient if self._divisor is None else gradient / self._divisor).coalesce()

    def describe(self, names: Sequence[str]) -> wire.Bucket:
        """The bucket as it travels; `names` are of all parameters, by index."""
        return describe(self.parameters, [names[member] for member in self.members])


def describe(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> wire.Bucket:
    """A bucket of these parameters as it travels."""
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
        parameters: All of them.
        assignment: Indices of each bucket's, in launch order.
        expect_sparse: Which of all get sparse gradients.
        as_views: Gradients are views to autograd too, on which it refuses `detach_()`.
    """
    return [
        Bucket(index, list(members), [parameters[m] for m in members], expect_sparse[members[0]], as_views)
        for index, members in enumerate(assignment)
    ]


def zeros_like(bucket: Bucket) -> Bucket:
    """A bucket of zeros with the same shape, for a rank that only takes part."""
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


def _views(buffer: torch.Tensor, parameters: Sequence[torch.nn.Parameter], as_views: bool) -> list[torch.Tensor]:
    views = []
    offset = 0
    for parameter in parameters:
        strides = parameter.stride()
        if torch.empty_like(parameter, device="meta").stride() != strides:
            strides = torch.empty(parameter.shape, device="meta").stride()
        if as_views:
            views.append(buffer.as_strided(parameter.shape, strides, offset + buffer.storage_offset()))
        else:
            alone = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
            views.append(alone.set_(buffer.untyped_storage(), offset, parameter.shape, strides))
        offset += parameter.numel()
    return views
