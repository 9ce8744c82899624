"""Listeners to optimizers' steps that begin and end at any moment, beside a user's own hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpobs.torch_seam import step_hooks

REGISTER: dict[str, Callable[[torch.optim.Optimizer, Callable[..., None]], Any]] = {
    "global pre": lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
    "global post": lambda optimizer, hook: register_optimizer_step_post_hook(hook),
    "own pre": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "own post": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
}


@pytest.fixture(autouse=True)
def _without_pair() -> Iterator[None]:
    """Let each test begin as a process does in which nothing listened yet."""

    def remove() -> None:
        while step_hooks._pair:
            step_hooks._pair.pop().remove()

    remove()
    yield
    remove()


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=1.0)


@pytest.fixture
def calls() -> list[str]:
    return []


def listener(calls: list[str]) -> Callable[[], None]:
    return step_hooks.listen(lambda *_: calls.append("before"), lambda *_: calls.append("after"))


@contextmanager
def between_others(optimizer: torch.optim.Optimizer, kind: str, hook: Callable[[], None]) -> Iterator[None]:
    """A user's hook of that kind, which has others of every kind before and behind it."""
    others = [register(optimizer, lambda *_: None) for register in REGISTER.values()]
    handles = [*others, REGISTER[kind](optimizer, lambda *_: hook())]
    handles += [register(optimizer, lambda *_: None) for register in REGISTER.values()]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_of_the_users_may_begin_to_listen(optimizer: torch.optim.Optimizer, calls: list[str], kind: str) -> None:
    stops: list[Callable[[], None]] = []
    with between_others(optimizer, kind, lambda: stops.append(listener(calls))):
        optimizer.step()
    assert calls == []
    assert step_hooks.add_pair()
    optimizer.step()
    assert calls == ["before", "after"]
    stops[0]()


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_of_the_users_may_end_to_listen(optimizer: torch.optim.Optimizer, calls: list[str], kind: str) -> None:
    stop = listener(calls)
    with between_others(optimizer, kind, stop):
        optimizer.step()
    calls.clear()
    optimizer.step()
    assert calls == []


def test_another_thread_may_begin_and_end_during_a_step(optimizer: torch.optim.Optimizer, calls: list[str]) -> None:
    def begin_and_end() -> None:
        stop = listener(calls)
        assert not step_hooks.add_pair()
        stop()

    def on_another_thread() -> None:
        thread = threading.Thread(target=begin_and_end)
        thread.start()
        thread.join()

    with between_others(optimizer, "global pre", on_another_thread):
        optimizer.step()
    assert calls == []


def test_a_listener_may_end_itself(optimizer: torch.optim.Optimizer, calls: list[str]) -> None:
    stops: list[Callable[[], None]] = []
    stops.append(step_hooks.listen(lambda *_: stops[0](), lambda *_: calls.append("after")))
    stop = listener(calls)
    optimizer.step()
    assert calls == ["before", "after"]
    stop()
