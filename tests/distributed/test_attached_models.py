"""Models that come and go, and backward passes that bring a part of the gradients: telemetry on torch's own DDP."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
from ddpobs import telemetry, wire
from tests.distributed.compare import batch, net, train
from tests.distributed.launch import run_ranks
from tests.distributed.sent import Sent, sending
from tests.distributed.test_steps import SLOW_NS, SLOW_S, ddp_factory

UNUSED = {"find_unused_parameters": True}
SMALL_BUCKETS = {"bucket_cap_mb": 1e-5}
STEPS = 4


def collect_on_the_telemetry_thread() -> None:
    process, done = telemetry._process, threading.Event()
    assert process is not None

    def collect() -> None:
        if not done.is_set():
            gc.collect()
            done.set()

    process._exporter.call_every(0.05, collect)
    assert done.wait(10)


def collect_in_the_next_attach() -> None:
    join = telemetry.join

    def collecting(*args: Any) -> Any:
        gc.collect()
        return join(*args)

    telemetry.join = collecting


def trainings(rank: int, world_size: int) -> dict[str, Any]:
    """Three models, each in a cycle of references; on each rank they are collected at another time, or never."""
    collect: list[Callable[[], object]] = [
        gc.collect,
        collect_on_the_telemetry_thread,
        collect_in_the_next_attach,
        lambda: None,
    ]
    gc.collect()
    gc.disable()
    with sending() as sent:
        for _ in range(3):
            ddp = TorchDDP(net())
            vars(ddp)["owner"] = SimpleNamespace(model=ddp)
            ddpobs.attach(ddp, sent.config)
            train(ddp, rank, STEPS)
            del ddp
            collect[rank]()
    return {
        "attempts": {(one.run, one.attempt, one.source) for one in sent.batches},
        "steps": sent.steps("step"),
        "spans": len(set(sent.spans("step"))),
        "goodbyes": sent.events.count("goodbye"),
    }


def test_models_one_after_the_other_share_an_attempt_whenever_they_are_collected() -> None:
    answers = run_ranks(trainings, 4)
    assert len({(run, attempt) for answer in answers for run, attempt, _ in answer["attempts"]}) == 1
    for answer in answers:
        assert len(answer["attempts"]) == 1
        assert answer["steps"] == list(range(3 * STEPS))
        assert answer["spans"] == 3 * STEPS
        assert answer["goodbyes"] == 1


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x), self.critic(x)


def two_losses(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name, options in {"one bucket": {}, "several buckets": SMALL_BUCKETS}.items():
        with sending() as sent:
            ddp = TorchDDP(ActorCritic(), **options)
            ddpobs.attach(ddp, sent.config)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(STEPS):
                optimizer.zero_grad()
                action, value = ddp(batch(rank, step))
                action.pow(2).mean().backward()
                value.pow(2).mean().backward()
                optimizer.step()
        found[name] = sent
    return {name: losses_seen(sent) for name, sent in found.items()}


def losses_seen(sent: Sent) -> dict[str, Any]:
    first, last = sent.layouts[0], sent.layouts[-1]
    flags = sent.steps("flags")
    return {
        "buckets": [len(first.buckets), *[len(last.buckets)] * (STEPS - 1)],
        "spans": [sent.spans("step").count(step) for step in range(STEPS)],
        "ordered": all(
            0 < ready <= launched <= done
            for ready, launched, done in zip(
                sent.spans("ready_ns"), sent.spans("launched_ns"), sent.spans("done_ns"), strict=True
            )
        ),
        "collectives": sent.steps("collective"),
        "backwards": sent.steps("micro_steps"),
        "clean": [not flag & wire.NO_ORIGIN for flag in flags],
        "unused": len(sent.unused),
        "phases": [sum(phases.values()) for phases in sent.phases()],
        "wall": [end - start for start, end in zip(sent.steps("start_ns"), sent.steps("end_ns"), strict=True)],
    }


def test_two_losses_with_parameters_of_their_own_are_one_synchronised_backward() -> None:
    for answers in run_ranks(two_losses, 2):
        assert answers["several buckets"]["buckets"][-1] > 1
        for seen in answers.values():
            assert seen["spans"] == seen["buckets"]
            assert seen["ordered"]
            assert seen["collectives"] == list(range(STEPS))
            assert seen["backwards"] == [2] * STEPS
            assert seen["clean"] == [False] + [True] * (STEPS - 1)
            assert seen["unused"] == 0
            assert seen["phases"] == seen["wall"]


class Middle(nn.Module):
    """Three layers of one size; nobody uses the middle one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.never, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def skipping(rank: int, world_size: int) -> dict[str, list[list[str]]]:
    """By setting, of each step the parameters whose buckets are told as launched, or as ready."""
    found = {}
    for setting in ("find_unused_parameters", "static_graph"):
        with sending() as sent:
            ddp = TorchDDP(Middle(), skip_all_reduce_unused_params=True, **SMALL_BUCKETS, **{setting: True})
            ddpobs.attach(ddp, sent.config)
            train(ddp, rank, STEPS)
        layouts = {layout.revision: layout.buckets for layout in sent.layouts}
        spans = list(zip(sent.spans("step"), sent.spans("revision"), sent.spans("bucket"), strict=True))
        found[setting] = [
            [p.name for at, revision, bucket in spans if at == step for p in layouts[revision][bucket].parameters]
            for step in sent.steps("step")
        ]
    return found


def test_a_bucket_that_torch_leaves_out_is_not_taken_for_the_next_one_of_its_size() -> None:
    used = ["last.weight", "first.weight"]
    for answer in run_ranks(skipping, 2):
        assert answer["find_unused_parameters"] == [used] * STEPS
        # Its first two backward passes have one bucket.
        assert answer["static_graph"][2:] == [used] * (STEPS - 2)


def every_reduction_is_delayed(rank: int, world_size: int) -> bool:
    """Torch 2.13 cannot run its forward, and has no reducer for it."""
    module = net()
    late = list(module.named_parameters())
    module.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    ddp = TorchDDP(module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module[0].weight)
    with sending() as sent:
        attachment = ddpobs.attach(ddp, sent.config)
        assert attachment is not None
        attachment.detach()
    return telemetry._process is None


def test_a_model_whose_reductions_are_all_delayed_can_be_attached() -> None:
    assert run_ranks(every_reduction_is_delayed, 2) == [True, True]


def armed(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Two losses in turn, each reduced by word to the reducer alone, as Lightning and Accelerate have it."""
    with sending() as sent:
        ddp = ddp_factory(kind, sent)(net())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            for power in (1, 2):
                with ddp.no_sync():
                    loss = ddp(batch(rank, step)).pow(power).sum()
                ddp.reducer.prepare_for_backward([])
                loss.backward()
            optimizer.step()
    return {
        "spans": sent.spans("step"),
        "backwards": sent.steps("micro_steps"),
        "ready": [ready > 0 for ready in sent.spans("ready_ns")],
        "unused": len(sent.unused),
    }


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_a_backward_that_the_reducer_alone_was_told_of_is_seen(kind: str) -> None:
    steps = 2 * STEPS
    expected = {"spans": list(range(steps)), "backwards": [1] * steps, "ready": [True] * steps, "unused": 0}
    assert run_ranks(armed, 2, kind) == [expected] * 2


class Sometimes(nn.Module):
    """A layer that is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if whole else x  # type: ignore[no-any-return]


def used_before(rank: int, world_size: int) -> tuple[list[list[str]], list[int]]:
    """One layer is only used under `no_sync`, long before the gradients are reduced; in the last step not at all."""
    with sending() as sent:
        ddp = TorchDDP(Sometimes(), find_unused_parameters=True, **SMALL_BUCKETS)
        ddpobs.attach(ddp, sent.config)
        for step in range(STEPS):
            if step < STEPS - 1:
                with ddp.no_sync():
                    ddp(batch(rank, step), True).sum().backward()
            time.sleep(SLOW_S)
            ddp(batch(rank, step), False).sum().backward()
    waits = [at - ready for ready, at in zip(sent.spans("ready_ns"), sent.spans("launched_ns"), strict=True) if ready]
    return [unused.locally for unused in sent.unused], waits


def test_a_gradient_of_a_micro_batch_long_ago_is_used_and_makes_no_bucket_ready_then() -> None:
    for unused, waits in run_ranks(used_before, 2):
        assert unused == [["sometimes.weight", "sometimes.bias"]]
        assert len(waits) >= STEPS
        assert max(waits) < SLOW_NS


def refused_hook(rank: int, world_size: int) -> tuple[list[str], set[str]]:
    def hook(state: object, bucket: int) -> Any: ...

    with sending() as sent:
        ddp = TorchDDP(net())
        ddpobs.attach(ddp, sent.config)
        with pytest.raises(ValueError, match="bucket"):
            ddp.register_comm_hook(None, hook)
        train(ddp, rank, STEPS)
    return sent.events, {layout.comm for layout in sent.layouts}


def test_a_hook_that_torch_refuses_is_not_told_as_the_model_s() -> None:
    for events, comm in run_ranks(refused_hook, 2):
        assert "comm_hook_set" not in events
        assert comm == {"all_reduce"}


def between(ddp: Any, rank: int, attach: Callable[[Any], object]) -> list[torch.Tensor]:
    """Attached after the first forward, before its backward."""
    loss = ddp(batch(rank)).sum()
    attach(ddp)
    loss.backward()
    return [p.grad.clone() for p in ddp.parameters()]


def after_micro_batches(ddp: Any, rank: int, attach: Callable[[Any], object]) -> list[torch.Tensor]:
    """Attached when a part of the gradients is there, of which torch remembers which parameters have one."""
    with ddp.no_sync():
        ddp(batch(rank), True).sum().backward()
    attach(ddp)
    ddp(batch(rank), False).sum().backward()
    return [p.grad.clone() for p in ddp.parameters()]


def hooked(module: nn.Module, **options: Any) -> Any:
    ddp = TorchDDP(module, **options)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return ddp


def attached_in_the_first_step(rank: int, world_size: int) -> list[bool]:
    found = []
    cases: list[tuple[Any, dict[str, Any], Any]] = [(net, {}, between), (Sometimes, UNUSED, after_micro_batches)]
    for build, options, first_step in cases:
        theirs = first_step(hooked(build(), **options), rank, lambda _: None)
        with sending() as sent:
            attach = partial(ddpobs.attach, telemetry=sent.config)
            ours = first_step(hooked(build(), **options), rank, attach)
        found += [all(map(torch.equal, ours, theirs)), "comm_hook_unseen" in sent.events]
    return found


def test_attaching_in_the_midst_of_the_first_step_of_a_hooked_model_changes_nothing() -> None:
    assert run_ranks(attached_in_the_first_step, 2) == [[True] * 4] * 2


def joined_anew(rank: int, world_size: int, folder: str) -> list[tuple[int, int]]:
    """Twice in one process, the second time with the ranks exchanged; the first model is still there."""
    models = []
    with sending() as sent:
        for turn in range(2):
            models.append(TorchDDP(net()))
            ddpobs.attach(models[-1], sent.config)
            train(models[-1], (rank + turn) % 2, STEPS)
            dist.destroy_process_group()
            address = f"file://{folder}/{turn}"
            dist.init_process_group("gloo", init_method=address, rank=(rank + 1 + turn) % 2, world_size=world_size)
    return [(batch.rank, len(batch.steps.step)) for batch in sent.batches if batch.steps]


def test_a_process_that_joins_the_others_anew_tells_its_new_rank(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(joined_anew, 2, str(tmp_path))):
        steps: Counter[int] = Counter()
        for whose, count in told:
            steps[whose] += count
        assert steps == {rank: STEPS, 1 - rank: STEPS}


def frozen_before_attaching(rank: int, world_size: int) -> list[object]:
    ddp = TorchDDP(net(), static_graph=True)
    train(ddp, rank, 3)
    for p in ddp.module[0].parameters():
        p.requires_grad_(False)
    with sending() as sent:
        attachment = ddpobs.attach(ddp, sent.config)
        assert attachment is not None
        attachment.detach()
    return [layout.buckets for layout in sent.layouts]


def test_a_model_that_was_frozen_in_part_since_it_was_wrapped_can_be_attached() -> None:
    assert run_ranks(frozen_before_attaching, 2) == [[]] * 2


def detached(rank: int, world_size: int) -> list[bool]:
    ddp = TorchDDP(net())
    with sending() as sent:
        attachment = ddpobs.attach(ddp, sent.config)
        process = telemetry._process
        assert attachment is not None
        assert process is not None
        train(ddp, rank, STEPS)
        references = [weakref.ref(attachment), weakref.ref(process)]
        attachment.detach()
    del attachment, process
    gc.collect()
    return [reference() is None for reference in references]


def test_a_model_that_was_detached_keeps_nothing_of_its_telemetry() -> None:
    assert run_ranks(detached, 2) == [[True, True]] * 2
