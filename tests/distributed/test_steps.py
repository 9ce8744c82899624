"""Training loops as people write them: each gives the right steps, with the right phases."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ddpobs
from ddpobs import DistributedDataParallel, wire
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks
from tests.distributed.sent import Sent, sending

SLOW_S = 0.3
SLOW_NS = 300_000_000
"""What a slow rank takes longer, and an evaluation of one batch: much longer than a full machine holds a rank up."""


def loader(rows: int = 16) -> Any:
    return DataLoader(TensorDataset(torch.randn(rows, 8)), batch_size=4)


def plain(make: Any, rank: int) -> None:
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        optimizer.zero_grad()
        ddp(rows).sum().backward()
        optimizer.step()


def accumulated(make: Any, rank: int) -> None:
    """Two micro-batches a step, four batches an epoch."""
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for number, (rows,) in enumerate(loader()):
        if number % 2 == 0:
            with ddp.no_sync():
                ddp(rows).sum().backward()
        else:
            ddp(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def without_optimizer(make: Any, rank: int) -> None:
    ddp = make(net())
    for (rows,) in loader():
        ddp(rows).sum().backward()


def without_loader(make: Any, rank: int) -> None:
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):
        ddp(batch(rank, step)).sum().backward()
        optimizer.step()


def several_optimizers(make: Any, rank: int) -> None:
    ddp = make(net())
    optimizers = [torch.optim.SGD([p], lr=0.01) for p in ddp.parameters()]
    for (rows,) in loader():
        ddp(rows).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def several_backwards(make: Any, rank: int) -> None:
    """Two losses a step, each with a backward of its own."""
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        output = ddp(rows)
        output.sum().backward(retain_graph=True)
        output.pow(2).sum().backward()
        optimizer.step()


def closures(make: Any, rank: int) -> None:
    ddp = make(net(16))
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=2)
    for (rows,) in loader():

        def closure(rows: torch.Tensor = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ddp(rows).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def overflowing(make: Any, rank: int) -> None:
    """The scaler skips the optimizer in the second step."""
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for number, (rows,) in enumerate(loader()):
        loss = ddp(rows).sum() * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def gan(make: Any, rank: int) -> None:
    """A step for the discriminator and one for the generator, in turn."""
    generator, discriminator = make(nn.Linear(8, 8)), make(net())
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


def evaluated(make: Any, rank: int) -> None:
    """An evaluation and a checkpoint between two epochs of two steps; both sleep."""
    ddp = make(net())
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


def recomputed(make: Any, rank: int) -> None:
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        checkpoint(ddp, rows.requires_grad_(), use_reentrant=False).sum().backward()  # type: ignore[union-attr]
        optimizer.step()


def fetched_ahead(make: Any, rank: int) -> None:
    """The next batch is fetched between backward and the optimizer."""
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batches = iter(loader())
    rows = next(batches, None)
    while rows is not None:
        ddp(rows[0]).sum().backward()
        rows = next(batches, None)
        optimizer.step()
        optimizer.zero_grad()


def stepping_in_backward(make: Any, rank: int) -> None:
    """An optimizer a parameter, called as its gradient comes; not reduced, but that is the loop's affair."""
    ddp = make(net())
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in ddp.parameters()}
    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(lambda q: (time.sleep(0.01), optimizers[q].step())[1])
    for (rows,) in loader():
        ddp(rows).sum().backward()


def uneven(make: Any, rank: int) -> None:
    ddp = make(net())
    with ddp.join():
        for step in range(4 + rank):
            ddp(batch(rank, step)).sum().backward()


def waiting_in_forward(make: Any, rank: int) -> None:
    """Rank 1 is slow before an all-reduce of the user's own, which hides that from the gradients' one."""
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            time.sleep(SLOW_S)
        mean = output.detach().mean()
        dist.all_reduce(mean)
        output.sum().backward()
        optimizer.step()


def waiting_asynchronously(make: Any, rank: int) -> None:
    ddp = make(net())
    for (rows,) in loader():
        output = ddp(rows)
        if rank == 1:
            time.sleep(SLOW_S)
        work = dist.all_reduce(output.detach().mean(), async_op=True)
        work.wait()
        dist.barrier()
        output.sum().backward()


def waiting_without_a_work(make: Any, rank: int) -> None:
    """As with NCCL, which gives no work where a collective is not asynchronous."""
    plain = dist.ProcessGroup.allreduce

    def all_reduce(group: dist.ProcessGroup, tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp
        plain(group, tensors, options).wait()

    with patch.object(dist.ProcessGroup, "allreduce", all_reduce):
        waiting_in_forward(make, rank)


def closures_without_loader(make: Any, rank: int) -> None:
    ddp = make(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ddp(batch(rank, step)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def in_evaluation_mode(make: Any, rank: int) -> None:
    ddp = make(net())
    ddp.eval()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):
        ddp(batch(rank, step)).sum().backward()
        optimizer.step()


def slow_while_unused_are_looked_for(make: Any, rank: int) -> None:
    """Rank 1 is slow in backward, under which the map of used parameters travels."""
    ddp = make(net(), find_unused_parameters=True)
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
        plain,
        accumulated,
        without_optimizer,
        without_loader,
        several_optimizers,
        several_backwards,
        closures,
        overflowing,
        gan,
        evaluated,
        recomputed,
        fetched_ahead,
        stepping_in_backward,
        uneven,
        waiting_in_forward,
        waiting_asynchronously,
        waiting_without_a_work,
        closures_without_loader,
        in_evaluation_mode,
        slow_while_unused_are_looked_for,
    )
}
STEPS = dict.fromkeys(LOOPS, 4) | {"accumulated": 2}
BACKWARDS = {"accumulated": 2, "several_backwards": 2}


def summary(sent: Sent) -> dict[str, Any]:
    return {
        "phases": sent.phases(),
        "own": sent.own(),
        "wall": [end - start for start, end in zip(sent.steps("start_ns"), sent.steps("end_ns"), strict=True)],
        "backwards": sent.steps("micro_steps"),
        "samples": sent.steps("samples"),
        "collectives": sent.steps("collective"),
        "clean": [not flags & wire.NO_ORIGIN for flags in sent.steps("flags")],
        "user": sent.comms("kind").count(wire.COMM_KINDS.index("user")),
    }


def makes(kind: str, sent: Sent) -> Callable[..., Any]:
    """What wraps a loop's modules."""

    def make(module: nn.Module, **options: Any) -> Any:
        if kind == "ours":
            return DistributedDataParallel(module, telemetry=sent.config, **options)
        ddp = TorchDDP(module, **options)
        ddpobs.attach(ddp, sent.config)
        return ddp

    return make


def all_loops(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    found = {}
    for name, loop in LOOPS.items():
        with sending() as sent:
            loop(makes(kind, sent), rank)
        found[name] = summary(sent)
    return found


def later(answers: dict[str, Any], which: str, *phases: str) -> list[int]:
    """By step after the first, ns in these phases."""
    return [sum(step[phase] for phase in phases) for step in answers[which][1:]]


def more(works: list[int], waits: list[int]) -> float:
    """By how many ns the one is above the other in the median step: the machine itself holds single steps up."""
    return median(work - wait for work, wait in zip(works, waits, strict=True))


@pytest.fixture(scope="module", params=["ours", "attached"])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(all_loops, 2, request.param)


@pytest.mark.parametrize("name", LOOPS)
def test_steps_are_counted_and_their_phases_add_up(found: list[dict[str, Any]], name: str) -> None:
    for rank, answers in enumerate(found):
        seen = answers[name]
        expected = STEPS[name] + (rank if name == "uneven" else 0)
        assert len(seen["wall"]) == expected
        assert [sum(phases.values()) for phases in seen["phases"]] == seen["wall"]
        if name != "closures":
            assert seen["backwards"] == [BACKWARDS.get(name, 1)] * expected


def test_exclusive_phases_of_a_closure_are_forward_and_backward_inside_the_optimizer(
    found: list[dict[str, Any]],
) -> None:
    for answers in found:
        for phases in answers["closures"]["phases"]:
            assert phases["forward"] > 0
            assert phases["backward"] > 0
            assert phases["optimizer"] > 0


def test_samples_are_those_of_every_micro_batch_once(found: list[dict[str, Any]]) -> None:
    for answers in found:
        assert answers["accumulated"]["samples"] == [8, 8]
        assert answers["recomputed"]["samples"] == [4] * 4


def test_a_step_after_the_first_has_a_clean_start_unless_something_came_between(found: list[dict[str, Any]]) -> None:
    for answers in found:
        for name in ("plain", "accumulated", "gan", "several_backwards", "overflowing", "recomputed", "fetched_ahead"):
            clean = answers[name]["clean"]
            assert clean == [False] + [True] * (len(clean) - 1), name
        assert answers["evaluated"]["clean"] == [False, True, False, True]


def test_an_evaluation_is_part_of_no_step(found: list[dict[str, Any]]) -> None:
    for answers in found:
        assert max(answers["evaluated"]["wall"]) < 2 * SLOW_NS


def test_an_optimizer_inside_backward_is_optimizer(found: list[dict[str, Any]]) -> None:
    for answers in found:
        assert sum(phases["optimizer"] for phases in answers["stepping_in_backward"]["phases"]) > 0


def test_a_skipped_optimizer_takes_no_time(found: list[dict[str, Any]]) -> None:
    for answers in found:
        assert [phases["optimizer"] > 0 for phases in answers["overflowing"]["phases"]] == [True, False, True, True]


def test_ranks_stay_joined_when_one_has_run_out_of_data(found: list[dict[str, Any]]) -> None:
    first, second = (answers["uneven"]["collectives"] for answers in found)
    assert first == [0, 1, 2, 3]
    assert second == [0, 1, 2, 3, 4]


def test_a_rank_that_is_slow_in_backward_is_found_while_unused_parameters_are_looked_for(
    found: list[dict[str, Any]],
) -> None:
    waits, works = (answers["slow_while_unused_are_looked_for"] for answers in found)
    assert more(later(works, "own", "backward"), later(waits, "own", "backward")) > 0.8 * SLOW_NS
    assert median(later(waits, "phases", "exposed_comm")) > 0.8 * SLOW_NS


@pytest.mark.parametrize("name", ["waiting_in_forward", "waiting_asynchronously", "waiting_without_a_work"])
def test_a_rank_that_is_slow_before_a_collective_of_the_users_own_is_found(
    found: list[dict[str, Any]], name: str
) -> None:
    waits, works = (answers[name] for answers in found)
    assert waits["user"] >= 4
    whole = wire.OWN_PHASES
    assert more(later(works, "own", *whole), later(waits, "own", *whole)) > 0.8 * SLOW_NS
    assert more(later(works, "own", "forward"), later(waits, "own", "forward")) > 0.8 * SLOW_NS
    assert median(later(waits, "phases", "exposed_comm")) > 0.8 * SLOW_NS
