"""Memory of a bucket's gradients, and how it survives user code that replaces or keeps gradients.

After a backward `parameter.grad` is a view of the bucket's buffer, which the next backward overwrites. User code may
interfere between the two:

| user code | detected by | result |
|---|---|---|
| keeps `parameter.grad` after `zero_grad()` | reference count of the view's Python object | buffer is replaced |
| keeps a tensor of the same memory (`grad.detach()`, `grad.data`) | use count of the storage | buffer is replaced |
| sets `parameter.grad = None` and keeps nothing | neither count changed | buffer is reused |
| accumulates into `parameter.grad`, or only reads it | `parameter.grad` is the view | buffer is reused |
| replaces the memory (`grad.data = ...`, `grad.set_(...)`) | data pointer of the view | view is recreated |
| does the latter in its gradient hook | data pointer, as the gradient arrives | view is recreated |

With `gradient_as_bucket_view=True` the user has allowed the overwriting, so that kept gradients are not looked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch


class GradientMemory:
    """One allocation of a bucket's buffer, with a view per parameter.

    Args:
        parameters: The bucket's, in the order of the buffer.
        dtype: Of the buffer, which need not be the parameters' own.
        sparse: The one parameter's gradient is sparse: there are no elements and no views.
        as_views: Autograd may see the gradients as views of the buffer. It refuses `detach_()` on such a tensor.

    Attributes:
        buffer: The flat buffer, one dimension.
        head: Its first element, as a tensor of at most one element.
        views: Each parameter's part, in the parameter's own shape and strides.
        pointers: The data pointer that each view must have.
        never_exposed: Positions of the views that have not been a `.grad`, so that nothing can hold them.
    """

    __slots__ = (
        "_as_views",
        "_parameters",
        "_references",
        "_storage",
        "_use_count",
        "buffer",
        "head",
        "never_exposed",
        "pointers",
        "views",
    )

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype, sparse: bool, as_views: bool
    ) -> None:
        self._parameters, self._as_views = parameters, as_views
        elements = 0 if sparse else sum(parameter.numel() for parameter in parameters)
        self.buffer = torch.zeros(elements, dtype=dtype, device=parameters[0].device)
        self.head = self.buffer[:1]
        self.views = [] if sparse else views_of(self.buffer, parameters, as_views)
        self._references = list(map(sys.getrefcount, self.views))
        self.pointers = list(map(torch.Tensor.data_ptr, self.views))
        self._storage = self.buffer.untyped_storage()._cdata
        self._use_count = torch._C._storage_Use_Count(self._storage)
        self.never_exposed = set(range(len(self.views)))

    @property
    def is_shared(self) -> bool:
        """Whether a tensor besides the gradients has this memory, as after `detach()` or `data`."""
        return bool(torch._C._storage_Use_Count(self._storage) != self._use_count)

    def is_held(self) -> bool:
        """Whether user code still holds a gradient of the last backward and may read it."""
        references = list(map(sys.getrefcount, self.views))
        shared = self.is_shared
        if not shared and references == self._references:
            return False
        return any(
            parameter.grad is not view
            and slot not in self.never_exposed
            and (shared or references[slot] != self._references[slot])
            for slot, (parameter, view) in enumerate(zip(self._parameters, self.views, strict=True))
        )

    def restore_views(self) -> None:
        """Recreate the views whose memory was replaced.

        Every data pointer is compared, at 0.06 µs each. The storage's use count is not enough: a kept reference to the
        old data offsets the lost one.
        """
        if list(map(torch.Tensor.data_ptr, self.views)) == self.pointers:
            return
        for slot, fresh in enumerate(views_of(self.buffer, self._parameters, self._as_views)):
            if self.views[slot].data_ptr() != self.pointers[slot]:
                self.views[slot] = fresh

    def take_over(self, slot: int, gradient: torch.Tensor) -> None:
        """Move a parameter's gradient into the buffer. As with torch's DDP it stays the tensor that the user holds."""
        view = self.views[slot].copy_(gradient)
        if self._as_views:
            self._parameters[slot].grad = view
        else:
            gradient.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
            self.views[slot] = gradient
        self.never_exposed.discard(slot)

    def update_exposed(self) -> None:
        """Note which views are a `.grad` now. Call it at the end of each backward."""
        parameters, views = self._parameters, self.views
        self.never_exposed = {slot for slot in self.never_exposed if parameters[slot].grad is not views[slot]}


def views_of(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter], as_views: bool) -> list[torch.Tensor]:
    """Each parameter's part of a flat tensor, in the parameter's own shape, and in its strides if they are dense.

    Args:
        flat: One dimension, as long as all parameters together.
        parameters: In their order in `flat`.
        as_views: Return views to autograd too, instead of tensors that only share the memory.
    """
    views = []
    offset = 0
    for parameter in parameters:
        strides = parameter.stride()
        if torch.empty_like(parameter, device="meta").stride() != strides:
            strides = torch.empty(parameter.shape, device="meta").stride()
        if as_views:
            views.append(flat.as_strided(parameter.shape, strides, offset + flat.storage_offset()))
        else:
            empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
            views.append(empty.set_(flat.untyped_storage(), offset, parameter.shape, strides))
        offset += parameter.numel()
    return views
