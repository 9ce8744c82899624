"""Horovod's optimizer: trainings of scripts for `horovod.torch`, compared with gradients computed on one rank."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ddpobs.horovod as hvd
from ddpobs.errors import HorovodError, ModelsDifferError, ReducerError, StepOrderError
from ddpobs.horovod.compression import Compressor
from ddpobs.horovod.optimizer_arguments import fusion_threshold
from tests.support.distributed.compare import batch, grad, net
from tests.support.distributed.horovod import alone, half_used, how_close, loss, raised, together
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "four passes": {"passes": 4},
    "unused": {"loss_fn": half_used},
    "unused in four passes": {"loss_fn": half_used, "passes": 4},
    "two groups": {"num_groups": 2},
    "predivided by a power of two": {"gradient_predivide_factor": 4.0},
    "predivided": {"gradient_predivide_factor": 3.0},
    "fp16": {"compression": hvd.Compression.fp16},
}


class Halves(Compressor):
    """A user's compressor: bfloat16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.bfloat16(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


OPTIONS["a user's compressor"] = {"compression": Halves}
LOSSY = {"fp16", "a user's compressor"}


def trainings(rank: int, ranks: int) -> dict[str, str]:
    hvd.init()
    results = {}
    for name, options in OPTIONS.items():
        model, reference = net(), net()
        passes, loss_fn = options.get("passes", 1), options.get("loss_fn", loss)
        optimizer = together(model, rank, 4, **options)
        alone(reference, ranks, 4, passes, loss_fn, total=options.get("op") == hvd.Sum)
        results[name] = how_close(model, reference)
        optimizer._reducer.remove_hooks()
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_is_that_of_all_batches_on_one_rank(ranks: int) -> None:
    for results in run_ranks(trainings, ranks):
        exact = {name for name, how in results.items() if how == "equal"}
        if ranks == 2:  # A sum of two does not depend on the order.
            assert exact == set(OPTIONS) - {"predivided"} - LOSSY
        off = {name: float(how.removeprefix("off by ")) for name, how in results.items() if name not in exact}
        assert {name for name, difference in off.items() if difference > (1e-3 if name in LOSSY else 1e-6)} == set(), (
            off
        )


# ---------------------------------------------------------------------- the rules of the optimizer


def rules(rank: int, ranks: int) -> dict[str, Any]:
    hvd.init()
    results: dict[str, Any] = {}
    model = net()
    inner = torch.optim.AdamW([{"params": list(model.parameters()), "lr": 0.25, "weight_decay": 0.5}])
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), backward_passes_per_step=2)
    results["an AdamW"] = isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"
    results["settings"] = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]
    stepped = []
    optimizer.register_step_pre_hook(lambda *_: stepped.append(1))
    loss(model, rank, 0).backward()
    results["zero_grad before step"] = raised(StepOrderError, optimizer.zero_grad)
    loss(model, rank, 1).backward()
    results["a third pass"] = raised(StepOrderError, lambda: loss(model, rank, 2).backward())
    optimizer.synchronize()
    reduced = [grad(parameter).clone() for parameter in model.parameters()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with optimizer.skip_synchronize():
        optimizer.step()
    results["step hooks"] = len(stepped)
    clipped = [parameter.grad for parameter in model.parameters()]
    results["clipped"] = all(not torch.equal(a, b) for a, b in zip(reduced, clipped, strict=True) if b is not None)
    optimizer.zero_grad()
    loss(model, rank, 3).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        optimizer.step()
    results["warnings"] = [str(warning.message).partition(":")[0] for warning in caught_warnings]
    optimizer.set_backward_passes_per_step(1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.zero_grad()
    loss(model, rank, 4).backward()
    optimizer.step()
    schedule.step()
    results["scheduled"] = optimizer.param_groups[0]["lr"]
    results["state"] = len(optimizer.state_dict()["state"])
    results["names"] = list(optimizer._parameter_names.values())
    optimizer.zero_grad()
    results["graph"] = raised(ReducerError, lambda: loss(model, rank, 5).backward(create_graph=True))
    refused: dict[str, dict[str, Any]] = {
        "named_parameters": {"named_parameters": model.parameters()},
        "duplicate names": {"named_parameters": [("x", p) for p in model.parameters()]},
        "are missing in it": {"named_parameters": list(model.named_parameters())[1:]},
        "Adasum": {"op": hvd.Adasum},
        "op": {"op": hvd.Max},
        "gradient_predivide_factor": {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        "at least 1, got 0": {"backward_passes_per_step": 0},
        "at least 1, got 1.5": {"backward_passes_per_step": 1.5},
        "above 0": {"gradient_predivide_factor": 0.0},
        "compress and decompress": {"compression": "fp16"},
        "lists of parameters": {"groups": "2"},
        "already": {"optimizer": optimizer},
        "torch.optim.Optimizer, got Sequential": {"optimizer": model},
    }
    for name, wrong in refused.items():
        message = raised(HorovodError, partial(hvd.DistributedOptimizer, **{"optimizer": inner, **wrong}))
        results.setdefault("clear", []).append(name in message)
    other = nn.Linear(3 + rank, 2)
    results["models"] = raised(ModelsDifferError, lambda: hvd.DistributedOptimizer(torch.optim.SGD(other.parameters())))
    different: dict[str, dict[str, Any]] = {
        "compression": {"compression": hvd.Compression.fp16},
        "op": {"op": hvd.Sum},
        "gradient_predivide_factor": {"gradient_predivide_factor": 2.0},
        "backward_passes_per_step": {"backward_passes_per_step": 2},
        "groups": {"num_groups": 2},
    }
    for name, odd in different.items():
        shard = odd if rank else {}
        message = raised(ModelsDifferError, partial(hvd.DistributedOptimizer, inner, **shard))
        results.setdefault("differ", []).append(f"models: {name} is " in message)
    return results


def test_the_optimizer_keeps_horovods_rules() -> None:
    for results in run_ranks(rules, 2):
        assert results["an AdamW"]
        assert results["settings"] == (0.25, 0.5)
        assert "not reduced yet" in results["zero_grad before step"]
        assert "backward_passes_per_step=2" in results["a third pass"]
        assert results["clipped"]
        assert results["step hooks"] == 1
        assert results["warnings"] == [
            "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize()"
        ]
        assert results["scheduled"] == 0.125
        assert results["state"] == 6
        assert results["names"] == [name for name, _ in net().named_parameters()]
        assert "torch.autograd.grad" in results["graph"]
        assert all(results["clear"])
        assert "on rank" in results["models"]
        assert all(results["differ"])


def sparse(rank: int, ranks: int) -> list[Any]:
    hvd.init()
    results = []
    for as_dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, sparse=True)
        inner = torch.optim.SparseAdam(table.parameters())
        optimizer = hvd.DistributedOptimizer(inner, sparse_as_dense=as_dense)
        table(torch.tensor([rank, 5])).sum().backward()
        optimizer.synchronize()
        gradient = table.weight.grad
        assert gradient is not None
        results.append((gradient.is_sparse, gradient.to_dense()[:, 0].tolist()))
        with optimizer.skip_synchronize():
            optimizer.step()
    return results


def test_sparse_adam_steps_on_sparse_gradients_also_with_sparse_as_dense() -> None:
    rows = [0.5, 0.5, 0, 0, 0, 1.0, 0, 0, 0, 0]
    assert run_ranks(sparse, 2) == [[(True, rows), (True, rows)]] * 2


# ---------------------------------------------------------------------- join, telemetry


def uneven(rank: int, ranks: int) -> Any:
    hvd.init()
    model = net()
    batches = [3, 1, 5, 5][rank]
    optimizer = together(model, rank, batches)
    last = hvd.join()
    return last, [p.tolist() for p in model.parameters()], optimizer._reducer.synchronised, batches


def test_a_rank_without_data_joins_and_the_others_go_on() -> None:
    results = run_ranks(uneven, 4)
    assert {last for last, *_ in results} == {3}
    parameters = [parameters for _, parameters, _, batches in results if batches == 5]
    assert parameters[0] == parameters[1]
    assert {count for _, _, count, _ in results} == {
        6
    }  # The longest rank's five steps, and one in which all ranks had joined.


def observed(rank: int, ranks: int) -> Any:
    hvd.init()
    model = net(1000)
    with sending() as records:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=2, telemetry=records.config
        )
        for step in range(5):
            optimizer.zero_grad()
            for number in range(2):
                loss(model, rank, 2 * step + number).backward()
            optimizer.step()
        with torch.no_grad():
            model.eval()
            model(batch(rank))
    return records


def test_telemetry_is_that_of_a_ddp_module() -> None:
    for records in run_ranks(observed, 2):
        assert records.layouts[0].name == "SGD"
        assert records.layouts[0].comm == "all_reduce"
        assert next(p.name for b in records.layouts[-1].buckets for p in b.parameters) == "4.bias"
        assert records.steps("step") == [0, 1, 2, 3, 4]
        assert records.steps("micro_steps") == [2] * 5
        assert records.steps("samples") == [8] * 5
        assert records.steps("collective") == [0, 1, 2, 3, 4]
        walls = [end - start for start, end in zip(records.steps("start_ns"), records.steps("end_ns"), strict=True)]
        assert [sum(phases.values()) for phases in records.phases()] == walls
        for phases in records.phases():
            assert all(phases[name] > 0 for name in ("forward", "backward", "exposed_comm", "optimizer")), phases
        assert all(
            ready <= launched <= done
            for ready, launched, done in zip(
                records.spans("ready_ns"), records.spans("launched_ns"), records.spans("done_ns"), strict=True
            )
        )


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)


def bucket_counts(rank: int, ranks: int) -> int:
    hvd.init()
    model = net()
    return len(together(model, rank, 2)._reducer.core.bucket_bytes)


@pytest.mark.parametrize(("threshold", "buckets"), [(None, 1), ("0", 6), ("10000", 2)])
def test_the_fusion_threshold_limits_buckets(
    threshold: str | None, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if threshold is not None:
        monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", threshold)
    assert run_ranks(bucket_counts, 2) == [buckets] * 2


def differing_thresholds(rank: int, ranks: int) -> int:
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "10000" if rank else "0"
    return bucket_counts(rank, ranks)


def test_every_rank_uses_rank_0s_fusion_threshold() -> None:
    assert run_ranks(differing_thresholds, 2) == [6, 6]


def test_an_invalid_threshold_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "64MB")
    assert "got '64MB'" in raised(HorovodError, fusion_threshold)


def with_closures(rank: int, ranks: int) -> list[bool]:
    """By optimizer: whether each rank's parameters equal a training on all batches."""
    hvd.init()
    inputs = torch.randn(ranks * 4, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for kind in (partial(torch.optim.SGD, lr=0.1), partial(torch.optim.LBFGS, lr=0.1, max_iter=4)):
        trained = []
        for shard in (inputs[rank * 4 : rank * 4 + 4], inputs):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            optimizer: Any = kind(model.parameters())
            if shard is not inputs:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

            def closure(model: Any = model, optimizer: Any = optimizer, shard: Any = shard) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(shard).pow(2).mean()
                loss.backward()
                return loss if shard is inputs else hvd.allreduce(loss.detach())

            for _ in range(3):
                optimizer.step(closure)
            trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        of_shard, of_all = trained
        results.append(torch.allclose(of_shard, of_all, rtol=1e-4, atol=1e-6))
    return results


def test_a_closures_gradients_are_reduced_before_the_step_uses_them() -> None:
    assert run_ranks(with_closures, 2) == [[True, True]] * 2


def in_turn(rank: int, ranks: int) -> str:
    """Replace an optimizer by another; the first one's hooks would reduce every gradient twice."""
    hvd.init()
    model, reference = net(), net()
    for _ in range(2):
        together(model, rank, 3)
        alone(reference, ranks, 3, 1, loss)
    return how_close(model, reference)


def test_an_optimizer_that_is_dropped_leaves_the_model_to_the_next() -> None:
    assert run_ranks(in_turn, 2) == ["equal"] * 2
