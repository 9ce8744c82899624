"""A user's own hooks of every kind beside telemetry: same parameters bit for bit, same number of calls."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
import ddpobs.horovod as hvd
from tests.support.distributed.compare import batch, net, outcome
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.user_hooks import ENTERED, HANDLED, Hook, Target, provoke

pytestmark = pytest.mark.wide

STEPS = 3
Door = Callable[[Target, Any], Any]
"""Puts the target's model behind a door of ddpobs, with these telemetry settings; returns the callable model."""


def of_torch(target: Target, _config: Any) -> Any:
    return TorchDDP(target.model)


def ours(target: Target, config: Any) -> Any:
    return ddpobs.DistributedDataParallel(target.model, telemetry=config)


def attached(target: Target, config: Any) -> Any:
    ddp = TorchDDP(target.model)
    ddpobs.attach(ddp, telemetry=config)
    return ddp


def horovod(target: Target, config: Any) -> Any:
    hvd.init()
    target.optimizer = hvd.DistributedOptimizer(target.optimizer, telemetry=config)
    return target.model


def _silent(door: Door) -> Door:
    return lambda target, _: door(target, False)


DOORS: dict[str, tuple[Door, Door]] = {
    "ours": (ours, of_torch),
    "attach": (attached, of_torch),
    "horovod": (horovod, _silent(horovod)),
}
"""With ddpobs and without; a script for Horovod without its telemetry."""
ON_STEPS = [kind for kind in HANDLED if "_step_" in kind]
MODES = ("TorchFunctionMode", "TorchDispatchMode")
"""They receive the operations of a reducer too: ours has others than torch's."""


def train(rank: int, target: Target, model: Any) -> None:
    target.optimizer.load_state_dict(target.optimizer.state_dict())
    target.model.load_state_dict(target.model.state_dict())
    for step in range(STEPS):
        target.optimizer.zero_grad()
        model(batch(rank, step)).pow(2).mean().backward()
        target.optimizer.step()
        provoke()


def counted(rank: int, door: Door, kind: str, once: bool, config: Any = None) -> tuple[int, list[torch.Tensor]]:
    """Train beside one hook, and return its number of calls and the result.

    Args:
        rank: This rank.
        door: The door.
        kind: The hook's kind.
        once: The hook removes itself in its first call.
        config: Settings of telemetry that is on already; without them it begins after the hook.
    """
    calls = 0
    handles: list[Any] = []

    def hook(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        while once and handles:
            handles.pop().remove()

    def install() -> None:
        if kind in HANDLED:
            handles.append(HANDLED[kind](target, hook))
        else:
            ENTERED[kind](stack, hook)

    model = net()
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    with ExitStack() as stack:
        if config is None:
            config = stack.enter_context(sending()).config
            install()
            called = door(target, config)
        else:
            called = door(target, config)
            install()
        train(rank, target, called)
        while handles:
            handles.pop().remove()
    return calls, outcome(model)


def different(rank: int, ranks: int, name: str) -> list[str]:
    """The hooks whose calls, or whose trainings' parameters, differ with telemetry."""
    found = [found for kind in (*HANDLED, *ENTERED) for found in difference(rank, name, kind, False)]
    with sending() as records:
        anchor = DOORS[name][0](Target(net(), torch.optim.SGD(net().parameters(), lr=0.1)), records.config)
        for kind in (*HANDLED, *ENTERED):
            found += difference(rank, name, kind, False, records.config)
        for kind in HANDLED:
            found += difference(rank, name, kind, True, records.config)
        del anchor
    return found


def difference(rank: int, name: str, kind: str, once: bool, config: Any = None) -> Iterator[str]:
    with_ddpobs, without = DOORS[name]
    if name == "ours" and kind in MODES:
        without = _silent(ours)
    calls, result = counted(rank, with_ddpobs, kind, once, config)
    expected_calls, expected = counted(rank, without, kind, once, config)
    label = f"{kind} {'before' if config is None else 'after'}{', once' * once}"
    if calls != expected_calls:
        yield f"{label}: {calls} calls instead of {expected_calls}"
    if not all(map(torch.equal, result, expected)):
        yield f"{label}: other parameters"


@pytest.mark.parametrize("door", DOORS)
def test_hooks_of_the_users_are_called_as_often_and_change_as_little_as_without_telemetry(door: str) -> None:
    assert run_ranks(ignoring_provocations, 2, different, door) == [[], []]


def changing(ddp: Any, config: Any) -> Hook:
    """A hook on optimizers that attaches in the first step, and detaches in the third."""
    steps = count()

    def change(*_: object) -> None:
        step = next(steps)
        attachment = ddpobs.attach(ddp, telemetry=config) if step in (0, STEPS - 1) else None
        if step == STEPS - 1:
            assert attachment is not None
            attachment.detach()

    return change


def attached_by_hooks(rank: int, ranks: int) -> tuple[bool, list[int], int]:
    """Train twice, with and without such a hook between others."""
    results, stepped = [], 0
    for attaches in (False, True):
        model = net()
        ddp, optimizer = TorchDDP(model), torch.optim.SGD(model.parameters(), lr=0.05)
        with sending() as records:

            def counting(*_: object) -> None:
                nonlocal stepped
                stepped += 1

            others = [HANDLED[kind](Target(model, optimizer), counting) for kind in ON_STEPS]
            handles = (
                [HANDLED[ON_STEPS[0]](Target(model, optimizer), changing(ddp, records.config))] if attaches else []
            )
            others += [HANDLED[kind](Target(model, optimizer), counting) for kind in ON_STEPS]
            train(rank, Target(model, optimizer), ddp)
            train(rank, Target(model, optimizer), ddp)
            for handle in (*handles, *others):
                handle.remove()
        results.append(outcome(model))
    return all(map(torch.equal, *results)), records.steps("step"), stepped


def test_a_hook_on_optimizers_may_attach_and_detach_between_other_hooks() -> None:
    for equal, recorded, stepped in run_ranks(ignoring_provocations, 2, attached_by_hooks):
        assert equal
        assert recorded
        assert stepped == 2 * 2 * STEPS * 2 * len(ON_STEPS)


def hooked_before_wrapping(rank: int, ranks: int) -> list[int]:
    return [counted(rank, horovod, kind, False)[0] for kind in HANDLED if kind.startswith("optimizer.register_step")]


def test_hooks_of_an_optimizer_from_before_horovod_wraps_it_are_called() -> None:
    assert run_ranks(ignoring_provocations, 2, hooked_before_wrapping) == [[STEPS, STEPS]] * 2


def ignoring_provocations(rank: int, ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    sys.excepthook = lambda *_: None
    threading.excepthook = lambda _: None
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return function(rank, ranks, *args)
