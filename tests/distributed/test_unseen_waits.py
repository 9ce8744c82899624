"""Waits and backward passes that come by ways of their own: a slow rank is found all the same."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from ddpobs import wire
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending
from tests.distributed.test_steps import SLOW_NS, SLOW_S, later, loader, makes, more, summary

_backward = torch.autograd.backward
"""As a script has it that imports the function by its name, before telemetry begins."""


def functional_collectives(make: Any, rank: int) -> None:
    """Rank 1 is slow before a functional collective, which waits where its result is used."""
    ddp = make(net())
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            time.sleep(SLOW_S)
        mean = functional.all_reduce(output.detach().mean(), "avg", dist.group.WORLD)
        (output.sum() * (1 + 0 * mean)).backward()


def the_future_of_a_work(make: Any, rank: int) -> None:
    """Rank 1 is slow before a collective whose future is waited for."""
    ddp = make(net())
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            time.sleep(SLOW_S)
        (mean,) = dist.all_reduce(output.detach().mean(), async_op=True).get_future().wait()
        (output.sum() * (1 + 0 * mean)).backward()


def the_rebuild(make: Any, rank: int) -> None:
    """Rank 1 is slow once, before the forward that lays the buckets anew."""
    ddp = make(net(), broadcast_buffers=False)
    for step in range(4):
        if rank == 1 and step == 1:
            time.sleep(SLOW_S)
        ddp(batch(rank, step)).sum().backward()


def a_backward_by_another_name(make: Any, rank: int) -> None:
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            output.register_hook(lambda _: time.sleep(SLOW_S))
        _backward(output.sum())
        optimizer.step()


def labels_of_its_own(make: Any, rank: int) -> None:
    """The model labels each batch before it is trained on it, on rank 1 slowly."""
    ddp = make(net())
    for (rows,) in loader():
        ddp.eval()
        with torch.no_grad():
            labels = ddp(rows)
            if rank == 1:
                time.sleep(SLOW_S)
        ddp.train()
        (ddp(rows) - labels).square().sum().backward()


LOOPS = (functional_collectives, the_future_of_a_work, the_rebuild, a_backward_by_another_name, labels_of_its_own)


def all_loops(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    found = {}
    for loop in LOOPS:
        with sending() as sent:
            loop(makes(kind, sent), rank)
        found[loop.__name__] = summary(sent)
    return found


@pytest.fixture(scope="module", params=["ours", "attached"])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(all_loops, 2, request.param)


def test_every_loop_has_its_steps(found: list[dict[str, Any]]) -> None:
    for answers in found:
        for seen in answers.values():
            assert seen["backwards"] == [1] * 4
            assert [sum(phases.values()) for phases in seen["phases"]] == seen["wall"]
            assert seen["clean"] == [False, True, True, True]


@pytest.mark.parametrize("loop", ["functional_collectives", "the_future_of_a_work"])
def test_a_rank_that_is_slow_before_a_collective_is_found(found: list[dict[str, Any]], loop: str) -> None:
    waits, works = (answers[loop] for answers in found)
    assert waits["user"] >= 4
    assert more(later(works, "own", "forward"), later(waits, "own", "forward")) > 0.8 * SLOW_NS
    assert median(later(waits, "phases", "exposed_comm")) > 0.8 * SLOW_NS


def test_the_wait_for_the_buckets_new_order_is_no_work_of_the_rank_that_waits(found: list[dict[str, Any]]) -> None:
    waits, works = (answers["the_rebuild"] for answers in found)
    whole = wire.OWN_PHASES
    assert later(works, "own", *whole)[0] - later(waits, "own", *whole)[0] > 0.8 * SLOW_NS
    assert waits["phases"][1]["exposed_comm"] > 0.8 * SLOW_NS


def test_a_backward_by_another_name_makes_steps_that_name_the_slow_rank(found: list[dict[str, Any]]) -> None:
    waits, works = (answers["a_backward_by_another_name"] for answers in found)
    whole = wire.OWN_PHASES
    assert more(later(works, "own", *whole), later(waits, "own", *whole)) > 0.8 * SLOW_NS


def test_what_a_model_does_without_gradients_in_mid_step_is_part_of_the_step(found: list[dict[str, Any]]) -> None:
    waits, works = (answers["labels_of_its_own"] for answers in found)
    whole = wire.OWN_PHASES
    assert more(later(works, "own", *whole), later(waits, "own", *whole)) > 0.8 * SLOW_NS
    assert min(later(waits, "phases", "data")) > 0
    assert waits["samples"] == [4] * 4


def compiled(rank: int, world_size: int) -> bool:
    """`fullgraph` is an error where the graph breaks."""

    def mean(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "avg", dist.group.WORLD) + 1

    with sending() as sent:
        makes("ours", sent)(net())
        x = torch.full((3,), float(rank))
        return bool(torch.equal(torch.compile(mean, fullgraph=True, backend="aot_eager")(x), torch.full((3,), 2.0)))


def test_a_compiled_functional_collective_breaks_no_graph() -> None:
    assert all(run_ranks(compiled, 2))
