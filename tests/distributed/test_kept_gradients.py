"""Gradients that a script keeps, changes in a hook, or gives other memory: they are what torch's DDP makes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ddpobs import DistributedDataParallel
from ddpobs.buckets.bucket import Bucket
from tests.distributed.compare import batch, net, outcome
from tests.distributed.launch import run_ranks

CAP = {"bucket_cap_mb": 0.05}


def let_go(buckets: Sequence[Bucket]) -> None:
    """Return once a thread of the process group's has let go of the buckets: a moment after they were waited for."""
    ends = time.monotonic() + 10
    while any(bucket.memory.is_shared for bucket in buckets) and time.monotonic() < ends:
        time.sleep(0.001)
    time.sleep(0.02)


def memory(rank: int, world_size: int) -> dict[str, int]:
    """By loop, how many times the buckets had other memory than in the step before, from the third step on."""
    taken = {}
    for name, (options, loop) in LOOPS.items():
        ddp = DistributedDataParallel(net(), **{**CAP, **options})
        if "hook" in name:
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3) if "PowerSGD" in name else None
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook if state else default_hooks.fp16_compress_hook)
        optimizer = loop.get("optimizer", torch.optim.SGD)(ddp.parameters(), lr=0.01)
        places: list[list[int]] = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=loop.get("set_to_none", True))
            with ddp.no_sync():
                ddp(batch(rank, step + 50)).sum().backward()
            ddp(batch(rank, step)).sum().backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            [p.grad.untyped_storage().nbytes() for p in ddp.parameters()]
            optimizer.step()
            let_go(ddp.reducer.core.buckets)
            places.append([bucket.buffer.data_ptr() for bucket in ddp.reducer.core.buckets])
        taken[name] = sum(before != after for before, after in pairwise(places[2:]))
    return taken


LOOPS: dict[str, Any] = {
    "plain": ({}, {}),
    "zeroed in place": ({}, {"set_to_none": False}),
    "Adam": ({}, {"optimizer": torch.optim.Adam}),
    "RMSprop": ({}, {"optimizer": torch.optim.RMSprop}),
    "static": ({"static_graph": True}, {}),
    "flag": ({"find_unused_parameters": True}, {}),
    "fp16": ({"comm": "fp16"}, {}),
    "int8": ({"comm": "int8"}, {}),
    "topk": ({"comm": "topk:0.1"}, {}),
    "powersgd": ({"comm": "powersgd:1"}, {}),
    "parameter server": ({"comm": "parameter_server"}, {}),
    "fp16 hook": ({}, {}),
    "PowerSGD hook": ({"bucket_cap_mb": 25}, {}),
}


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_a_training_in_which_nobody_keeps_gradients_stays_in_the_memory_it_has() -> None:
    assert run_ranks(memory, 2) == [dict.fromkeys(LOOPS, 0)] * 2


def keeping(keep: Callable[[torch.Tensor], torch.Tensor], accumulates: bool = False) -> Any:
    """What someone keeps of each step's gradients, at the end; one parameter's may be accumulated from step to step."""

    def case(kind: Any, rank: int) -> Any:
        ddp, kept = kind(net(), **CAP), []
        for step in range(4):
            ddp(batch(rank, step)).sum().backward()
            places = [place for place, p in enumerate(ddp.parameters()) if not accumulates or place % 3]
            parameters = list(ddp.parameters())
            kept += [keep(parameters[place].grad) for place in places]
            for place in places:
                parameters[place].grad = None
        return [*kept, *outcome(ddp)]

    return case


def stepping_on_aliases(kind: Any, rank: int) -> Any:
    """An optimizer by hand that took hold of each gradient's data once; one parameter is never used."""
    module = nn.ModuleDict({"used": net(), "never": nn.Linear(2, 2)})
    module.forward = module["used"].forward
    ddp = kind(module, find_unused_parameters=True)
    aliases: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(4):
        ddp.zero_grad(set_to_none=False)
        ddp(batch(rank, step)).sum().backward()
        aliases = aliases or [(p, p.grad.data) for p in module["used"].parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, gradient in aliases:
                parameter.sub_(0.01 * gradient)
    return outcome(ddp)


def holding(take: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Any:
    """An optimizer by hand that took hold of the first step's gradients, and zeroes these and steps on them."""

    def case(kind: Any, rank: int) -> Any:
        ddp, held, theirs = kind(net(), **CAP, **options), [], []
        for step in range(5):
            for gradient in held:
                gradient.zero_()
            ddp(batch(rank, step)).sum().backward()
            held = held or [take(p.grad) for p in ddp.parameters()]
            theirs.append([p.grad is gradient for p, gradient in zip(ddp.parameters(), held, strict=True)])
            with torch.no_grad():
                for parameter, gradient in zip(ddp.parameters(), held, strict=True):
                    parameter.sub_(0.01 * gradient)
        return [theirs, outcome(ddp)]

    return case


def leading_away(keeps: bool, set_to_none: bool, lead: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
    """Gradients are given other memory after each step, as by old ways to clip them; what was theirs may be kept."""

    def case(kind: Any, rank: int) -> Any:
        ddp, kept, found = kind(net(), **CAP), [], []
        for step in range(4):
            ddp.zero_grad(set_to_none=set_to_none)
            ddp(batch(rank, step)).sum().backward()
            found.append(outcome(ddp))
            older = [p.grad.data for p in ddp.parameters()]
            for parameter, gradient in zip(ddp.parameters(), older, strict=True):
                lead(parameter.grad, gradient * 0.5)
            kept.append(older if keeps else [])
            del older, gradient
        return [found, kept[0], outcome(ddp)]

    return case


def by_data(gradient: torch.Tensor, other: torch.Tensor) -> None:
    gradient.data = other


def clamps(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def steps_alone(parameter: torch.Tensor) -> None:
    """An optimizer in backward: what is reduced then is nothing."""
    with torch.no_grad():
        parameter -= 0.01 * parameter.grad
    parameter.grad = None


def leads_away(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad.data * 0.5


def hooking(hook: Callable[[torch.Tensor], None], again: bool = False, set_to_none: bool = True, **options: Any) -> Any:
    """A hook that was registered after wrapping, once or anew for every step."""

    def case(kind: Any, rank: int) -> Any:
        ddp, handles = kind(net(), **CAP, **options), []
        for step in range(4):
            if again or step == 0:
                while handles:
                    handles.pop().remove()
                handles += [p.register_post_accumulate_grad_hook(hook) for p in ddp.parameters()]
            ddp.zero_grad(set_to_none=set_to_none)
            ddp(batch(rank, step)).pow(2).sum().backward()
        return outcome(ddp)

    return case


def hooking_within(kind: Any, rank: int) -> Any:
    """One that was registered between forward and backward."""
    ddp = kind(net(), **CAP)
    loss = ddp(batch(rank)).sum()
    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(clamps)
    loss.backward()
    return outcome(ddp)


CASES = {
    "a hook of the user's clamps": hooking(clamps),
    "a hook of the user's clamps, anew for every step": hooking(clamps, again=True),
    "a hook of the user's clamps, static": hooking(clamps, static_graph=True),
    "a hook of the user's steps": hooking(steps_alone),
    "a hook of the user's leads gradients away": hooking(leads_away),
    "a hook of the user's leads gradients away, zeroed in place": hooking(leads_away, set_to_none=False),
    "a hook that comes after the forward": hooking_within,
    "gradients kept": keeping(lambda gradient: gradient),
    "gradients kept by detach": keeping(torch.Tensor.detach),
    "gradients kept by data": keeping(lambda gradient: gradient.data),
    "gradients kept by a view": keeping(lambda gradient: gradient.view(-1)[1:]),
    "gradients kept beside accumulated ones": keeping(lambda gradient: gradient, accumulates=True),
    "gradients kept by detach beside accumulated ones": keeping(torch.Tensor.detach, accumulates=True),
    "stepping on aliases of gradients": stepping_on_aliases,
    "stepping on the first gradients": holding(lambda gradient: gradient),
    "stepping on the first gradients, static": holding(lambda gradient: gradient, static_graph=True),
    "stepping on the first gradients' data": holding(lambda gradient: gradient.data),
    "stepping on a view of the first gradients": holding(lambda gradient: gradient.view(gradient.shape)),
    "gradients led away": leading_away(False, True, by_data),
    "gradients led away, zeroed in place": leading_away(False, False, by_data),
    "gradients led away, kept": leading_away(True, True, by_data),
    "gradients led away, kept, zeroed in place": leading_away(True, False, by_data),
    "gradients led away by set_, zeroed in place": leading_away(False, False, torch.Tensor.set_),
}


CLOSE = {
    "gradients kept by detach beside accumulated ones",
    "stepping on the first gradients, static",
    "stepping on the first gradients' data",
    "stepping on a view of the first gradients",
    "gradients led away, zeroed in place",
    "gradients led away by set_, zeroed in place",
}
"""On four ranks: ours keeps its first layout where somebody holds a gradient's memory, and torch lays a static graph's
buckets anew a step later."""


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_torch(found: list[dict[str, str]], case: str) -> None:
    allowed = {"equal", "close"} if case in CLOSE and len(found) > 2 else {"equal"}
    assert {verdict[case] for verdict in found} <= allowed
