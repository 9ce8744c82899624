"""Telemetry on torch's own DDP: models that are created and collected, and backwards with a part of the gradients."""

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
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
from ddpobs import telemetry, wire
from tests.support.distributed.compare import batch, net, train
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.loops import ddp_factory
from tests.support.distributed.sent import Sent, sending

UNUSED = {"find_unused_parameters": True}
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 1e-5}
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

    mock.patch.object(telemetry, "join", collecting).start()


def trainings(rank: int, world_size: int) -> dict[str, Any]:
    """Train three models in reference cycles; each rank collects them at another time, or never."""
    collect: list[Callable[[], object]] = [
        gc.collect,
        collect_on_the_telemetry_thread,
        collect_in_the_next_attach,
        lambda: None,
    ]
    gc.collect()
    gc.disable()
    with sending() as records:
        for _ in range(3):
            ddp = TorchDDP(net())
            vars(ddp)["owner"] = SimpleNamespace(model=ddp)
            ddpobs.attach(ddp, records.config)
            train(ddp, rank, STEPS)
            del ddp
            collect[rank]()
    return {
        "attempts": {(sent_batch.run, sent_batch.attempt, sent_batch.source) for sent_batch in records.batches},
        "steps": records.steps("step"),
        "spans": len(set(records.spans("step"))),
        "goodbyes": records.events.count("goodbye"),
    }


def test_successive_models_share_an_attempt_whenever_they_are_collected() -> None:
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
    results = {}
    for name, options in {"one bucket": {}, "several buckets": SMALL_BUCKETS}.items():
        with sending() as records:
            ddp = TorchDDP(ActorCritic(), **options)
            ddpobs.attach(ddp, records.config)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(STEPS):
                optimizer.zero_grad()
                action, value = ddp(batch(rank, step))
                action.pow(2).mean().backward()
                value.pow(2).mean().backward()
                optimizer.step()
        results[name] = records
    return {name: losses_seen(records) for name, records in results.items()}


def losses_seen(records: Sent) -> dict[str, Any]:
    first, last = records.layouts[0], records.layouts[-1]
    flags = records.steps("flags")
    return {
        "buckets": [len(first.buckets), *[len(last.buckets)] * (STEPS - 1)],
        "spans": [records.spans("step").count(step) for step in range(STEPS)],
        "ordered": all(
            0 < ready <= launched <= done
            for ready, launched, done in zip(
                records.spans("ready_ns"), records.spans("launched_ns"), records.spans("done_ns"), strict=True
            )
        ),
        "collectives": records.steps("collective"),
        "backwards": records.steps("micro_steps"),
        "clean": [not flag & wire.NO_ORIGIN for flag in flags],
        "unused": len(records.unused),
        "phases": [sum(phases.values()) for phases in records.phases()],
        "wall": [end - start for start, end in zip(records.steps("start_ns"), records.steps("end_ns"), strict=True)],
    }


def test_two_losses_with_parameters_of_their_own_are_one_synchronised_backward() -> None:
    for answers in run_ranks(two_losses, 2):
        assert answers["several buckets"]["buckets"][-1] > 1
        for summary in answers.values():
            assert summary["spans"] == summary["buckets"]
            assert summary["ordered"]
            assert summary["collectives"] == list(range(STEPS))
            assert summary["backwards"] == [2] * STEPS
            assert summary["clean"] == [False] + [True] * (STEPS - 1)
            assert summary["unused"] == 0
            assert summary["phases"] == summary["wall"]


class Middle(nn.Module):
    """Three layers of one size, of which the middle one is unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.never, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def skipping(rank: int, world_size: int) -> dict[str, list[list[str]]]:
    """By setting and step, the parameters of the recorded buckets."""
    results = {}
    for setting in ("find_unused_parameters", "static_graph"):
        with sending() as records:
            options = SMALL_BUCKETS | {setting: True}
            ddp = TorchDDP(Middle(), skip_all_reduce_unused_params=True, **options)
            ddpobs.attach(ddp, records.config)
            train(ddp, rank, STEPS)
        layouts = {layout.revision: layout.buckets for layout in records.layouts}
        spans = list(zip(records.spans("step"), records.spans("revision"), records.spans("bucket"), strict=True))
        results[setting] = [
            [
                p.name
                for span_step, revision, bucket in spans
                if span_step == step
                for p in layouts[revision][bucket].parameters
            ]
            for step in records.steps("step")
        ]
    return results


def test_a_bucket_that_torch_skips_is_not_confused_with_the_next_of_its_size() -> None:
    used = ["last.weight", "first.weight"]
    for answer in run_ranks(skipping, 2):
        assert answer["find_unused_parameters"] == [used] * STEPS
        # With a static graph the first two backwards have one bucket.
        assert answer["static_graph"][2:] == [used] * (STEPS - 2)


def every_reduction_is_delayed(rank: int, world_size: int) -> bool:
    """Attach a model with delayed reductions; torch 2.13 creates no reducer for it and cannot run its forward."""
    module = net()
    late = list(module.named_parameters())
    module.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    ddp = TorchDDP(module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module[0].weight)
    with sending() as records:
        attachment = ddpobs.attach(ddp, records.config)
        assert attachment is not None
        attachment.detach()
    return telemetry._process is None


def test_a_model_whose_reductions_are_all_delayed_can_be_attached() -> None:
    assert run_ranks(every_reduction_is_delayed, 2) == [True, True]


def armed(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Prepare the reducer directly before each of two losses, as Lightning and Accelerate do."""
    with sending() as records:
        ddp = ddp_factory(kind, records)(net())
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
        "spans": records.spans("step"),
        "backwards": records.steps("micro_steps"),
        "ready": [ready > 0 for ready in records.spans("ready_ns")],
        "unused": len(records.unused),
    }


@pytest.mark.parametrize("kind", ["ours", "attached"])
def test_a_backward_without_a_synchronised_forward_is_recorded(kind: str) -> None:
    steps = 2 * STEPS
    expected = {"spans": list(range(steps)), "backwards": [1] * steps, "ready": [True] * steps, "unused": 0}
    assert run_ranks(armed, 2, kind) == [expected] * 2


class Sometimes(nn.Module):
    """A layer that is used if `whole` is true."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if whole else x


def used_before(rank: int, world_size: int) -> tuple[list[list[str]], list[int]]:
    """Use one layer only under `no_sync`, long before the reduction; in the last step not at all."""
    reduced_ns = []
    with sending() as records:
        ddp = TorchDDP(Sometimes(), find_unused_parameters=True, **SMALL_BUCKETS)
        ddpobs.attach(ddp, records.config)
        for step in range(STEPS):
            if step < STEPS - 1:
                with ddp.no_sync():
                    ddp(batch(rank, step), True).sum().backward()
            reduced_ns.append(time.monotonic_ns())
            ddp(batch(rank, step), False).sum().backward()
    ready = zip(records.spans("step"), records.spans("ready_ns"), strict=True)
    return [unused.locally for unused in records.unused], [at_ns - reduced_ns[step] for step, at_ns in ready if at_ns]


def test_an_earlier_micro_batchs_gradient_counts_as_used_but_not_as_ready() -> None:
    for unused, ready_after_ns in run_ranks(used_before, 2):
        assert unused == [["sometimes.weight", "sometimes.bias"]]
        assert len(ready_after_ns) >= STEPS
        assert min(ready_after_ns) > 0


def refused_hook(rank: int, world_size: int) -> tuple[list[str], set[str]]:
    def hook(state: object, bucket: int) -> Any: ...

    with sending() as records:
        ddp = TorchDDP(net())
        ddpobs.attach(ddp, records.config)
        with pytest.raises(ValueError, match="bucket"):
            ddp.register_comm_hook(None, hook)
        train(ddp, rank, STEPS)
    return records.events, {layout.comm for layout in records.layouts}


def test_a_hook_that_torch_refuses_is_not_recorded() -> None:
    for events, comm in run_ranks(refused_hook, 2):
        assert "comm_hook_set" not in events
        assert comm == {"all_reduce"}


def attach_before_backward(ddp: Any, rank: int, attach: Callable[[Any], object]) -> list[torch.Tensor]:
    """Attach between the first forward and its backward."""
    loss = ddp(batch(rank)).sum()
    attach(ddp)
    loss.backward()
    return [p.grad.clone() for p in ddp.parameters()]


def attach_after_micro_batches(ddp: Any, rank: int, attach: Callable[[Any], object]) -> list[torch.Tensor]:
    """Attach after micro-batches, for which torch has recorded the used parameters."""
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
    results = []
    cases: list[tuple[Any, dict[str, Any], Any]] = [
        (net, {}, attach_before_backward),
        (Sometimes, UNUSED, attach_after_micro_batches),
    ]
    for build, options, first_step in cases:
        theirs = first_step(hooked(build(), **options), rank, lambda _: None)
        with sending() as records:
            attach = partial(ddpobs.attach, telemetry=records.config)
            ours = first_step(hooked(build(), **options), rank, attach)
        results += [all(map(torch.equal, ours, theirs)), "comm_hook_unseen" in records.events]
    return results


def test_attaching_within_the_first_step_of_a_hooked_model_does_not_change_the_result() -> None:
    assert run_ranks(attached_in_the_first_step, 2) == [[True] * 4] * 2


def joined_anew(rank: int, world_size: int, folder: str) -> list[tuple[int, int]]:
    """Train twice in one process, the second time with exchanged ranks, while the first model is alive."""
    models = []
    with sending() as records:
        for turn in range(2):
            models.append(TorchDDP(net()))
            ddpobs.attach(models[-1], records.config)
            train(models[-1], (rank + turn) % 2, STEPS)
            dist.destroy_process_group()
            address = f"file://{folder}/{turn}"
            dist.init_process_group("gloo", init_method=address, rank=(rank + 1 + turn) % 2, world_size=world_size)
    return [(batch.rank, len(batch.steps.step)) for batch in records.batches if batch.steps]


def test_a_process_that_rejoins_reports_its_new_rank(tmp_path: Path) -> None:
    for rank, batches in enumerate(run_ranks(joined_anew, 2, str(tmp_path))):
        steps: Counter[int] = Counter()
        for reporting_rank, count in batches:
            steps[reporting_rank] += count
        assert steps == {rank: STEPS, 1 - rank: STEPS}


def frozen_before_attaching(rank: int, world_size: int) -> list[object]:
    ddp = TorchDDP(net(), static_graph=True)
    train(ddp, rank, 3)
    for p in ddp.module[0].parameters():
        p.requires_grad_(False)
    with sending() as records:
        attachment = ddpobs.attach(ddp, records.config)
        assert attachment is not None
        attachment.detach()
    return [layout.buckets for layout in records.layouts]


def test_a_model_that_was_partly_frozen_after_wrapping_can_be_attached() -> None:
    assert run_ranks(frozen_before_attaching, 2) == [[]] * 2


def detached(rank: int, world_size: int) -> list[bool]:
    ddp = TorchDDP(net())
    with sending() as records:
        attachment = ddpobs.attach(ddp, records.config)
        process = telemetry._process
        assert attachment is not None
        assert process is not None
        train(ddp, rank, STEPS)
        references: list[weakref.ref[Any]] = [weakref.ref(attachment), weakref.ref(process)]
        attachment.detach()
    del attachment, process
    gc.collect()
    return [reference() is None for reference in references]


def test_a_detached_model_holds_no_reference_to_its_telemetry() -> None:
    assert run_ranks(detached, 2) == [[True, True]] * 2
