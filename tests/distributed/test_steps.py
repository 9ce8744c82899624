"""Common training loops: each has the right steps, with the right phases."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpobs import wire
from tests.support.distributed.compare import batch, net
from tests.support.distributed.delays import excess_ns, phase_ns, waited_ns
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.loops import SLOW_NS, SLOW_S, ddp_factory, loader, summary
from tests.support.distributed.sent import sending


def plain_loop(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        optimizer.zero_grad()
        ddp(rows).sum().backward()
        optimizer.step()


def accumulation(wrap: Any, rank: int) -> None:
    """Two micro-batches a step, four batches an epoch."""
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for number, (rows,) in enumerate(loader()):
        if number % 2 == 0:
            with ddp.no_sync():
                ddp(rows).sum().backward()
        else:
            ddp(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def without_optimizer(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    for (rows,) in loader():
        ddp(rows).sum().backward()


def without_loader(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):
        ddp(batch(rank, step)).sum().backward()
        optimizer.step()


def several_optimizers(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    optimizers = [torch.optim.SGD([p], lr=0.01) for p in ddp.parameters()]
    for (rows,) in loader():
        ddp(rows).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def several_backwards(wrap: Any, rank: int) -> None:
    """Two losses a step, each with its own backward."""
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        output = ddp(rows)
        output.sum().backward(retain_graph=True)
        output.pow(2).sum().backward()
        optimizer.step()


def closures(wrap: Any, rank: int) -> None:
    ddp = wrap(net(16))
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=2)
    for (rows,) in loader():

        def closure(rows: torch.Tensor = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = ddp(rows).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def gradient_overflow(wrap: Any, rank: int) -> None:
    """The scaler skips the optimizer in the second step."""
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for number, (rows,) in enumerate(loader()):
        loss = ddp(rows).sum() * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def gan(wrap: Any, rank: int) -> None:
    """Alternate between a step of the discriminator and a step of the generator."""
    generator, discriminator = wrap(nn.Linear(8, 8)), wrap(net())
    first = torch.optim.SGD(discriminator.parameters(), lr=0.01)
    second = torch.optim.SGD(generator.parameters(), lr=0.01)
    for (rows,) in loader(8):
        with torch.no_grad():
            fake = generator(torch.randn(4, 8))
        first.zero_grad()
        (discriminator(rows).sum() - discriminator(fake).sum()).backward()
        first.step()
        discriminator.requires_grad_(False)
        second.zero_grad()
        discriminator(generator(torch.randn(4, 8))).sum().backward()
        second.step()
        discriminator.requires_grad_(True)


def evaluation_between_epochs(wrap: Any, rank: int) -> None:
    """An evaluation and a checkpoint between two epochs of two steps; both sleep."""
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(2):
        ddp.train()
        for (rows,) in loader(8):
            optimizer.zero_grad()
            ddp(rows).sum().backward()
            optimizer.step()
        ddp.eval()
        with torch.no_grad():
            for (rows,) in loader(8):
                ddp(rows)
                time.sleep(SLOW_S)


def checkpointing(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        checkpoint(ddp, rows.requires_grad_(), use_reentrant=False).sum().backward()
        optimizer.step()


def prefetching(wrap: Any, rank: int) -> None:
    """The next batch is fetched between backward and the optimizer."""
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batches = iter(loader())
    rows = next(batches, None)
    while rows is not None:
        ddp(rows[0]).sum().backward()
        rows = next(batches, None)
        optimizer.step()
        optimizer.zero_grad()


def optimizers_in_backward(wrap: Any, rank: int) -> None:
    """An optimizer for each parameter, called when its gradient arrives, before it is reduced."""
    ddp = wrap(net())
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in ddp.parameters()}

    def step(parameter: torch.Tensor) -> None:
        time.sleep(0.01)
        optimizers[parameter].step()

    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(step)
    for (rows,) in loader():
        ddp(rows).sum().backward()


def uneven_data(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    with ddp.join():
        for step in range(4 + rank):
            ddp(batch(rank, step)).sum().backward()


def wait_in_forward(wrap: Any, rank: int) -> None:
    """Rank 1 is slow before an all-reduce of the user's, which hides the delay from the gradients' all-reduce."""
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            time.sleep(SLOW_S)
        mean = output.detach().mean()
        dist.all_reduce(mean)
        output.sum().backward()
        optimizer.step()


def asynchronous_wait(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            time.sleep(SLOW_S)
        work = dist.all_reduce(output.detach().mean(), async_op=True)
        work.wait()
        dist.barrier()
        output.sum().backward()


def wait_without_a_work(wrap: Any, rank: int) -> None:
    """NCCL returns no work for a collective that is not asynchronous."""
    original = dist.ProcessGroup.allreduce

    def all_reduce(group: dist.ProcessGroup, tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp
        original(group, tensors, options).wait()

    with patch.object(dist.ProcessGroup, "allreduce", all_reduce):
        wait_in_forward(wrap, rank)


def closures_without_loader(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = ddp(batch(rank, step)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def in_evaluation_mode(wrap: Any, rank: int) -> None:
    ddp = wrap(net())
    ddp.eval()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):
        ddp(batch(rank, step)).sum().backward()
        optimizer.step()


def slow_backward_with_unused_parameters(wrap: Any, rank: int) -> None:
    """Rank 1 is slow in backward, under which the map of used parameters travels."""
    ddp = wrap(net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            output.register_hook(lambda _: time.sleep(SLOW_S))
        output.sum().backward()
        optimizer.step()


LOOPS: dict[str, Callable[[Any, int], None]] = {
    loop.__name__: loop
    for loop in (
        plain_loop,
        accumulation,
        without_optimizer,
        without_loader,
        several_optimizers,
        several_backwards,
        closures,
        gradient_overflow,
        gan,
        evaluation_between_epochs,
        checkpointing,
        prefetching,
        optimizers_in_backward,
        uneven_data,
        wait_in_forward,
        asynchronous_wait,
        wait_without_a_work,
        closures_without_loader,
        in_evaluation_mode,
        slow_backward_with_unused_parameters,
    )
}
STEPS = dict.fromkeys(LOOPS, 4) | {"accumulation": 2}
BACKWARDS = {"accumulation": 2, "several_backwards": 2}


def all_loops(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    summaries = {}
    for name, loop in LOOPS.items():
        with sending() as capture:
            loop(ddp_factory(kind, capture), rank)
        summaries[name] = summary(capture)
    return summaries


@pytest.fixture(scope="module", params=["ours", "attached"])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(all_loops, 2, request.param)


@pytest.mark.parametrize("name", LOOPS)
def test_steps_are_counted_and_their_phases_add_up(results: list[dict[str, Any]], name: str) -> None:
    for rank, loops in enumerate(results):
        loop = loops[name]
        expected = STEPS[name] + (rank if name == "uneven_data" else 0)
        assert len(loop["wall"]) == expected
        assert [sum(phases.values()) for phases in loop["phases"]] == loop["wall"]
        if name != "closures":
            assert loop["backwards"] == [BACKWARDS.get(name, 1)] * expected


def test_a_closure_inside_the_optimizer_has_phases_forward_and_backward(
    results: list[dict[str, Any]],
) -> None:
    for loops in results:
        for phases in loops["closures"]["phases"]:
            assert phases["forward"] > 0
            assert phases["backward"] > 0
            assert phases["optimizer"] > 0


def test_samples_of_every_micro_batch_count_once(results: list[dict[str, Any]]) -> None:
    for loops in results:
        assert loops["accumulation"]["samples"] == [8, 8]
        assert loops["checkpointing"]["samples"] == [4] * 4


def test_a_step_after_the_first_has_a_clean_start_unless_an_evaluation_came_between(
    results: list[dict[str, Any]],
) -> None:
    for loops in results:
        for name in (
            "plain_loop",
            "accumulation",
            "gan",
            "several_backwards",
            "gradient_overflow",
            "checkpointing",
            "prefetching",
        ):
            clean = loops[name]["clean"]
            assert clean == [False] + [True] * (len(clean) - 1), name
        assert loops["evaluation_between_epochs"]["clean"] == [False, True, False, True]


def test_an_evaluation_is_part_of_no_step(results: list[dict[str, Any]]) -> None:
    for loops in results:
        assert loops["evaluation_between_epochs"]["gaps"][1] >= 2 * SLOW_NS


def test_an_optimizer_inside_backward_is_optimizer(results: list[dict[str, Any]]) -> None:
    for loops in results:
        assert sum(phases["optimizer"] for phases in loops["optimizers_in_backward"]["phases"]) > 0


def test_a_skipped_optimizer_takes_no_time(results: list[dict[str, Any]]) -> None:
    for loops in results:
        assert [phases["optimizer"] > 0 for phases in loops["gradient_overflow"]["phases"]] == [True, False, True, True]


def test_ranks_stay_joined_when_one_has_run_out_of_data(results: list[dict[str, Any]]) -> None:
    first, second = (loops["uneven_data"]["collectives"] for loops in results)
    assert first == [0, 1, 2, 3]
    assert second == [0, 1, 2, 3, 4]


def test_a_rank_that_is_slow_in_backward_is_found_with_find_unused_parameters(
    results: list[dict[str, Any]],
) -> None:
    fast, slow = (loops["slow_backward_with_unused_parameters"] for loops in results)
    assert min(phase_ns(slow, "own", "backward")) >= SLOW_NS
    assert excess_ns(slow, fast, "backward") > 3 * 0.8 * SLOW_NS
    assert waited_ns(fast) > 3 * 0.8 * SLOW_NS


@pytest.mark.parametrize("name", ["wait_in_forward", "asynchronous_wait", "wait_without_a_work"])
def test_a_rank_that_is_slow_before_a_collective_of_the_users_is_found(
    results: list[dict[str, Any]], name: str
) -> None:
    fast, slow = (loops[name] for loops in results)
    assert fast["user"] >= 4
    assert min(phase_ns(slow, "own", "forward")) >= SLOW_NS
    assert excess_ns(slow, fast, *wire.OWN_PHASES) > 3 * 0.8 * SLOW_NS
    assert excess_ns(slow, fast, "forward") > 3 * 0.8 * SLOW_NS
    assert waited_ns(fast) > 3 * 0.8 * SLOW_NS
