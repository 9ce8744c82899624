"""Waits and backward passes outside of the usual functions: a slow rank is found too."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from ddpobs import wire
from tests.support.distributed.compare import batch, net
from tests.support.distributed.delays import excess_ns, phase_ns, waited_ns
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.loops import SLOW_NS, SLOW_S, ddp_factory, loader, summary
from tests.support.distributed.sent import sending

_backward = torch.autograd.backward
"""A script may import the function by its name before telemetry begins."""


def functional_collectives(wrap: Any, rank: int) -> None:
    """Rank 1 is slow before a functional collective, which waits at the first use of its result."""
    ddp = wrap(net())
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            time.sleep(SLOW_S)
        mean = functional.all_reduce(output.detach().mean(), "avg", dist.group.WORLD)
        (output.sum() * (1 + 0 * mean)).backward()


def the_future_of_a_work(wrap: Any, rank: int) -> None:
    """Rank 1 is slow before a collective that is waited for by its future."""
    ddp = wrap(net())
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            time.sleep(SLOW_S)
        (mean,) = dist.all_reduce(output.detach().mean(), async_op=True).get_future().wait()
        (output.sum() * (1 + 0 * mean)).backward()


def the_rebuild(wrap: Any, rank: int) -> None:
    """Rank 1 is slow once, before the forward that rebuilds the buckets."""
    ddp = wrap(net(), broadcast_buffers=False)
    for step in range(4):
        if rank == 1 and step == 1:
            time.sleep(SLOW_S)
        ddp(batch(rank, step)).sum().backward()


def a_backward_by_another_name(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            output.register_hook(lambda _: time.sleep(SLOW_S))
        _backward(output.sum())
        optimizer.step()


def pseudo_labels(wrap: Any, rank: int) -> None:
    """The model labels each batch before it trains on it; rank 1 is slow at this."""
    ddp = wrap(net())
    for (rows,) in loader():
        ddp.eval()
        with torch.no_grad():
            labels = ddp(rows)
            if rank == 1:
                time.sleep(SLOW_S)
        ddp.train()
        (ddp(rows) - labels).square().sum().backward()


LOOPS = (functional_collectives, the_future_of_a_work, the_rebuild, a_backward_by_another_name, pseudo_labels)


def all_loops(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    summaries = {}
    for loop in LOOPS:
        with sending() as capture:
            loop(ddp_factory(kind, capture), rank)
        summaries[loop.__name__] = summary(capture)
    return summaries


@pytest.fixture(scope="module", params=["ours", "attached"])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(all_loops, 2, request.param)


def test_every_loop_has_its_steps(results: list[dict[str, Any]]) -> None:
    for loops in results:
        for loop in loops.values():
            assert loop["backwards"] == [1] * 4
            assert [sum(phases.values()) for phases in loop["phases"]] == loop["wall"]
            assert loop["clean"] == [False, True, True, True]


@pytest.mark.parametrize("loop", ["functional_collectives", "the_future_of_a_work"])
def test_a_rank_that_is_slow_before_a_collective_is_found(results: list[dict[str, Any]], loop: str) -> None:
    fast, slow = (loops[loop] for loops in results)
    assert fast["user"] >= 4
    assert min(phase_ns(slow, "own", "forward")) >= SLOW_NS
    assert excess_ns(slow, fast, "forward") > 3 * 0.8 * SLOW_NS
    assert waited_ns(fast) > 3 * 0.8 * SLOW_NS


def test_the_wait_for_the_buckets_new_order_is_not_own_time(results: list[dict[str, Any]]) -> None:
    fast, slow = (loops["the_rebuild"] for loops in results)
    assert phase_ns(slow, "own", *wire.OWN_PHASES)[0] >= SLOW_NS
    assert excess_ns(slow, fast, *wire.OWN_PHASES) > 0.8 * SLOW_NS
    assert waited_ns(fast) > 0.8 * SLOW_NS


def test_a_backward_by_another_name_makes_steps_that_name_the_slow_rank(results: list[dict[str, Any]]) -> None:
    fast, slow = (loops["a_backward_by_another_name"] for loops in results)
    assert min(phase_ns(slow, "own", *wire.OWN_PHASES)) >= SLOW_NS
    assert excess_ns(slow, fast, *wire.OWN_PHASES) > 3 * 0.8 * SLOW_NS


def test_a_forward_without_gradients_in_mid_step_is_part_of_the_step(results: list[dict[str, Any]]) -> None:
    fast, slow = (loops["pseudo_labels"] for loops in results)
    assert min(phase_ns(slow, "own", *wire.OWN_PHASES)) >= SLOW_NS
    assert excess_ns(slow, fast, *wire.OWN_PHASES) > 3 * 0.8 * SLOW_NS
    assert min(phase_ns(fast, "phases", "data")) > 0
    assert fast["samples"] == [4] * 4


def compiled(rank: int, world_size: int) -> bool:
    """Compile with `fullgraph`, which raises if the graph breaks."""

    def mean(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = functional.all_reduce(x * 2, "avg", dist.group.WORLD)
        return total + 1

    with sending() as capture:
        ddp_factory("ours", capture)(net())
        x = torch.full((3,), float(rank))
        return bool(torch.equal(torch.compile(mean, fullgraph=True, backend="aot_eager")(x), torch.full((3,), 2.0)))


def test_a_compiled_functional_collective_breaks_no_graph() -> None:
    assert all(run_ranks(compiled, 2))
