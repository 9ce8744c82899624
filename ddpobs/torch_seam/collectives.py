"""Torch's collectives as the reducer calls them: the unwrapped methods, which telemetry does not record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.torch_seam.patching import Patches, unwrap

_VALUE = unwrap(torch._C.Future.wait)

_MESSAGES = {12: "send", 13: "receive", 14: "receive"}
"""Values of c10d's `OpType` (torch/csrc/distributed/c10d/Work.hpp): SEND, RECV, RECVANYSOURCE."""

python_groups: list[tuple[type, type]] = []
"""Classes of process groups that are written in Python, each with the class of its works.

Telemetry wraps the methods of torch's classes, which a class in Python overrides.
"""


def register_python_group(group: type, work: type) -> None:
    """Let telemetry record the collectives of a class of process groups, with works of that class.

    Args:
        group: Overrides methods of `torch.distributed.ProcessGroup`; its groups have an attribute `timeout`.
        work: Overrides `wait`, and has an attribute `recorded`, which is False.
    """
    python_groups.append((group, work))
    _python_work_patches.put(torch._C._distributed_c10d.Reducer, "_set_forward_pass_work_handle", _with_future_of(work))


_python_work_patches = Patches()


def _with_future_of(kind: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give torch's reducer a work of C++ in place of one that is written in Python.

    Under `join` the reducer keeps the work that counts the active ranks. Nothing in Python refers to it any more: its
    `wait` is gone then, and that of C++'s base class waits for ever.
    """

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_forward_pass_work_handle(reducer: Any, work: Any, *arguments: Any) -> Any:
            if isinstance(work, kind):
                c10d: Any = torch._C._distributed_c10d
                work = c10d._create_work_from_future(work.get_future())
            return original(reducer, work, *arguments)

        return set_forward_pass_work_handle

    return around


def _unrecorded(kind: Any, torchs: Any, method: str) -> Any:
    """The method of a group's or work's class without telemetry's wrappers.

    Of a class in Python that is not registered, torch's method, which calls the class's with all arguments.
    """
    found = _methods.get((kind, method))
    if found is None:
        registered = any(kind in classes for classes in python_groups)
        found = _methods[kind, method] = unwrap(getattr(kind if registered else torchs, method))
    return found


_methods: dict[tuple[Any, str], Any] = {}


def all_reduce(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *options: Any) -> Any:
    """Start the group's all-reduce, unrecorded.

    `torch.distributed.all_reduce` has more overhead than a small bucket's exchange takes.
    """
    return _unrecorded(type(group), dist.ProcessGroup, "allreduce")(group, list(tensors), *options)


def broadcast_from_first(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *options: Any) -> Any:
    """Start the group's broadcast from its first rank, unrecorded.

    The function is not named `broadcast`. For a group that is written in Python, pybind11 looks at the caller's name:
    it takes a caller named like the method for an override that calls its parent.
    """
    return _unrecorded(type(group), dist.ProcessGroup, "broadcast")(group, list(tensors), *options)


def all_gather(group: dist.ProcessGroup, gathered: torch.Tensor, local: torch.Tensor) -> Any:
    """Start to gather the ranks' equally long tensors, one after the other, and return the work."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # The name until torch 2.12.
    return gather(gathered, local, group=group, async_op=True)


def values_of_all(group: dist.ProcessGroup, value: torch.Tensor) -> list[torch.Tensor]:
    """Gather the ranks' equally long tensors, unrecorded, and wait for them."""
    values = [torch.empty_like(value) for _ in range(group.size())]
    wait_for(_unrecorded(type(group), dist.ProcessGroup, "allgather")(group, [values], [value]))
    return values


def wait_for(work: Any) -> None:
    """Wait for a work, unrecorded; for its name see `broadcast_from_first`."""
    _unrecorded(type(work), dist.Work, "wait")(work)


def message_kind(work: Any) -> str:
    """Return `send` or `receive` for a work of two ranks, else an empty string.

    A batch of sends and receives is a single work over NCCL. It blocks as a receive does.
    """
    if not isinstance(work, dist.Work):
        return ""
    return _MESSAGES.get(work._get_op_type(), "")  # type: ignore[attr-defined]


def value_of(future: Any) -> Any:
    """Wait for a future, unrecorded, and return its value."""
    return _VALUE(future)


def name_of(group: dist.ProcessGroup) -> str:
    """The group's name, the same on every rank; a group that is written in Python has no name of its own."""
    return str(dist.distributed_c10d._get_process_group_name(group))


def group_text(group: dist.ProcessGroup) -> str:
    """A group in words: `the default group`, `group tensor of 4 ranks`."""
    with suppress(Exception):  # A group that torch did not make, or a version without descriptions.
        name = str(group.group_desc)
        if name == "default_pg":
            return "the default group"
        if name in {"", "undefined"}:
            name = name_of(group)
        return f"group {name} of {group.size()} ranks"
    return "a group"


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group in rising order; those of a group that torch did not make are counted from 0."""
    try:
        return sorted(dist.get_process_group_ranks(group))
    except KeyError:
        return list(range(group.size()))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that moves the group's tensors on that device.

    If the user chose no backend, torch calls the group's backend "undefined".
    """
    name = dist.get_backend(group)
    return name if name != "undefined" else str(group._get_backend(device).name())


def gloo_threads(group: dist.ProcessGroup) -> int | None:
    """Number of threads that run the group's collectives on the CPU; None if it is not a group of gloo's."""
    if dist.get_backend(group) != "gloo":
        return None
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_threads", None)


def time_collectives(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Make the group's works measure their duration; return whether they will.

    It costs NCCL one more event per work.
    """
    if device.type != "cuda" or "nccl" not in backend_of(group, device):
        return False
    group._enable_collectives_timing()  # type: ignore[attr-defined]
    return True
