"""What is asked of the autograd engine while it runs a backward, all of it in microseconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ddpobs.errors import ReducerError

_CUSTOM_BACKWARD = BackwardCFunction.apply.__code__
_forget: Callable[[str], None] = getattr(torch._C, "_remove_obj_from_tls", lambda _: None)
"""Not there in every version of torch."""


def leave_context() -> None:
    """Have what is launched from here on, until the engine's next node, hold nothing of Python's.

    `backward` hands Python's context to each node, and a work that is launched there keeps it. Gloo's thread may be the
    last that holds the work, and would need the interpreter to drop the context: where that is ending, the process is
    aborted.
    """
    _forget("context")


def watch(outputs: Sequence[torch.Tensor], begins: Callable[[Node], None]) -> int:
    """Have `begins` called with an output's node when a backward gets to it; how many of them can be differentiated.

    The node is asked of the engine by then: who holds it from the forward on keeps all activations alive.
    """
    differentiable = [output for output in outputs if output.grad_fn is not None]
    for output in differentiable:
        output.register_hook(lambda _: begins(torch._C._current_autograd_node()))
    return len(differentiable)


def one_at_a_time(hook: Callable[[torch.Tensor], None], turn: threading.RLock) -> Callable[[torch.Tensor], None]:
    """The hook, for gradients that come on several threads at once."""

    def in_turn(tensor: torch.Tensor) -> None:
        with turn:
            hook(tensor)

    return in_turn


def refuse_graph(through: str) -> None:
    """Called in a backward that goes through such a wrapper.

    Raises:
        ReducerError: It makes a graph of its own gradients.
    """
    if torch.is_grad_enabled():
        raise ReducerError(
            f"backward(create_graph=True) through {through}: gradients of gradients are not reduced. Take the inner "
            "derivative with torch.autograd.grad(..., create_graph=True), and the last backward() without"
        )


def refuse_compiled() -> None:
    """Called as a backward begins.

    Raises:
        ReducerError: Compiled autograd traces it, which drops what is to be called at its end.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise ReducerError(
            "backward() under compiled autograd (torch._dynamo.config.compiled_autograd): nothing would reduce the "
            "gradients. Leave it off, and compile the model: its backward is compiled too"
        )


def unreached(nodes: Sequence[Node]) -> list[int]:
    """Which parameters (by their AccumulateGrad nodes) the running backward will not reach; 0.2 µs a parameter."""
    will_execute = torch._C._will_engine_execute_node
    return [index for index, node in enumerate(nodes) if not will_execute(node)]


def concerns(nodes: Sequence[Node], output: Node) -> bool:
    """Whether the running backward accumulates into parameters, or would but reaches none.

    `torch.autograd.grad` and `backward(inputs=...)` pass through the outputs too, for a gradient penalty say, and leave
    the parameters out: they are then in the graph, but not to be executed.

    Args:
        nodes: The parameters' AccumulateGrad nodes.
        output: The node of the forward's output that the backward has got to.
    """
    try:
        if any(map(torch._C._will_engine_execute_node, nodes)):
            return True
    except RuntimeError:  # The gradient of a parameter is asked for and not accumulated.
        return False
    ahead = [output]
    ours, seen = set(nodes), set(ahead)
    while ahead:
        node = ahead.pop()
        if node in ours:
            return False
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        ahead.extend(fresh)
    return True


def at_end(call: Callable[[], None]) -> None:
    """Have `call` called at the end of the running backward, the outermost one.

    Inside a reentrant checkpoint the engine's own queue is that of the checkpoint's graph. What the outer graph runs
    next is what the checkpoint leads to, and there its queue can be had.
    """
    outermost = _outermost_custom_backward()
    following = [node for node, _ in outermost.next_functions if node is not None] if outermost is not None else []
    if not following:
        Variable._execution_engine.queue_callback(call)
        return
    handles: list[RemovableHandle] = []

    def queue(_: object) -> None:
        if handles:
            Variable._execution_engine.queue_callback(call)
        while handles:
            handles.pop().remove()

    handles += [node.register_prehook(queue) for node in following]


def _outermost_custom_backward() -> Node | None:
    """The `torch.autograd.Function` in whose backward this runs, as a checkpoint is one."""
    found = None
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _CUSTOM_BACKWARD:
            found = frame.f_locals["self"]
    return found
