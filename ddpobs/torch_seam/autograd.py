"""Queries and callbacks of the autograd engine during a backward; each takes microseconds."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from ddpobs.errors import ReducerError

_CUSTOM_BACKWARD = BackwardCFunction.apply.__code__
_REPETITIONS = {"backward": True, "unpack_hook": False}
"""Functions in torch's module of checkpoints that repeat a forward, and whether their checkpoint is reentrant."""
_remove_from_tls: Callable[[str], None] = getattr(torch._C, "_remove_obj_from_tls", lambda _: None)
"""Some versions of torch do not have it."""


def leave_context() -> None:
    """Remove Python's context, so that works launched before the engine's next node hold no Python object.

    `backward` gives Python's context to each node, and a work that is launched there keeps a reference to it. Gloo's
    thread may drop the last reference to the work, and then needs the interpreter to drop the context. If the
    interpreter is exiting, the process is aborted.
    """
    _remove_from_tls("context")


def watch(outputs: Sequence[torch.Tensor], callback: Callable[[Node], None]) -> int:
    """Call `callback` with an output's node when a backward reaches it; return the number of differentiable outputs.

    The engine gives the node at that time. A reference from the forward on would keep all activations alive.
    """
    differentiable = [output for output in outputs if output.grad_fn is not None]
    for output in differentiable:
        output.register_hook(lambda _: callback(torch._C._current_autograd_node()))
    return len(differentiable)


def serialize(hook: Callable[[torch.Tensor], None], lock: threading.RLock) -> Callable[[torch.Tensor], None]:
    """Wrap a hook with a lock, because gradients may arrive on several threads at once."""

    def locked(tensor: torch.Tensor) -> None:
        with lock:
            hook(tensor)

    return locked


@cache
def warn_of_graph() -> None:
    """Warn, once per process, that gradients of gradients stay on their rank."""
    warnings.warn(
        "Using DistributedDataParallel with create_graph=True: gradients are reduced, but higher-order gradients are "
        "not synchronized across ranks, because their graph does not contain the all-reduce",
        stacklevel=2,
    )


def refuse_graph(wrapper: str) -> None:
    """Refuse a backward that records a graph of its own gradients.

    Args:
        wrapper: The class that reduces the gradients, for the message.

    Raises:
        ReducerError: The running backward has `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise ReducerError(
            f"backward(create_graph=True) through {wrapper}: gradients of gradients are not reduced. Take the inner "
            "derivative with torch.autograd.grad(..., create_graph=True), and the last backward() without"
        )


def refuse_compiled() -> None:
    """Refuse a backward under compiled autograd; to be called as the backward begins.

    Raises:
        ReducerError: Compiled autograd traces the backward, and would drop the callbacks at its end.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise ReducerError(
            "backward() under compiled autograd (torch._dynamo.config.compiled_autograd): nothing would reduce the "
            "gradients. Switch it off, and compile the model: its backward is compiled too"
        )


def find_unreached(nodes: Sequence[Node]) -> list[int]:
    """Indices of the AccumulateGrad nodes that the running backward will not reach; 0.2 µs per parameter.

    The profiler shows it under the name of torch's own search.
    """
    will_execute = torch._C._will_engine_execute_node
    with torch._C._profiler._RecordFunctionFast("torch.distributed.ddp.reducer::search_unused_parameters"):
        return [index for index, node in enumerate(nodes) if not will_execute(node)]


def concerns(nodes: Sequence[Node], output: Node) -> bool:
    """Whether the running backward accumulates into parameters, or would but reaches none.

    `torch.autograd.grad` and `backward(inputs=...)` pass through the outputs too, for a gradient penalty for example,
    and leave the parameters out. The parameters' nodes are then in the graph but will not be executed.

    Args:
        nodes: The parameters' AccumulateGrad nodes.
        output: The node of the forward's output that the backward has reached.
    """
    try:
        if any(map(torch._C._will_engine_execute_node, nodes)):
            return True
    except RuntimeError:  # `torch.autograd.grad` returns a parameter's gradient instead of accumulating it.
        return False
    ahead = [output]
    accumulators, visited = set(nodes), set(ahead)
    while ahead:
        node = ahead.pop()
        if node in accumulators:
            return False
        fresh = {following for following, _ in node.next_functions if following is not None} - visited
        visited |= fresh
        ahead.extend(fresh)
    return True


def call_at_end(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the outermost running backward.

    Inside a reentrant checkpoint the engine's queue belongs to the checkpoint's graph. The outer graph next executes
    the nodes that follow the checkpoint, and their pre-hooks have access to its queue.
    """
    outermost = _outermost_custom_backward()
    following = [node for node, _ in outermost.next_functions if node is not None] if outermost is not None else []
    if not following:
        Variable._execution_engine.queue_callback(callback)
        return
    handles: list[RemovableHandle] = []

    def queue(_: object) -> None:
        if handles:
            Variable._execution_engine.queue_callback(callback)
        while handles:
            handles.pop().remove()

    handles += [node.register_prehook(queue) for node in following]


def is_repetition_reentrant() -> bool | None:
    """Whether the checkpoint that repeats the caller's forward is reentrant; None if none of torch's repeats it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _REPETITIONS and frame.f_code.co_filename == checkpoint.__file__:
            return _REPETITIONS[frame.f_code.co_name]
    return None


def _outermost_custom_backward() -> Node | None:
    """The outermost `torch.autograd.Function` whose backward is running; a checkpoint is such a function."""
    outermost = None
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _CUSTOM_BACKWARD:
            outermost = frame.f_locals["self"]
    return outermost
