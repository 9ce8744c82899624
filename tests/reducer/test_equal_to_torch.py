"""After twenty steps our parameters equal those of torch's DDP."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpobs import DistributedDataParallel
from tests.support.distributed.compare import grad
from tests.support.distributed.equality import CAPS, differences, equal_after_accumulation, train, unused_error
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.models import MODELS, build
from tests.support.distributed.sent import sending


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *(("transformer", size) for size in (1, 2, 4)),
        ("cnn", 2),
        *(pytest.param("cnn", size, marks=pytest.mark.wide) for size in (1, 4)),
    ],
)
def test_parameters_equal_those_of_torch_ddp(name: str, world_size: int) -> None:
    for equal, largest in chain(*run_ranks(differences, world_size, name, CAPS)):
        if world_size <= 2:
            assert equal, "sums of two do not depend on how the buckets are cut"
        assert largest < 1e-5


@pytest.mark.parametrize(
    ("world_size", "as_views"), [(1, False), (2, False), (3, True), pytest.param(4, False, marks=pytest.mark.wide)]
)
def test_with_the_same_buckets_parameters_are_equal_bit_for_bit(world_size: int, as_views: bool) -> None:
    options = CAPS | {"find_unused_parameters": True, "gradient_as_bucket_view": as_views}
    for name in ("transformer", "branches"):
        assert all(equal for equal, _ in chain(*run_ranks(differences, world_size, name, options)))


def test_no_sync_accumulates_as_torch_does() -> None:
    assert run_ranks(equal_after_accumulation, 2) == [True, True]


def unused_gradients(rank: int, world_size: int) -> list[Any]:
    """Return the gradients of a parameter that no rank uses, set by the user, and of a parameter that one rank uses."""
    ddp = DistributedDataParallel(build("branches"), find_unused_parameters=True)
    ddp.module.never.weight.grad = torch.full((16, 16), 3.0)
    batch = MODELS["branches"].batch(rank, 0)
    batch[0, 0] = 1.0 if rank == 0 else -1.0
    ddp(batch).sum().backward()
    never, sometimes = ddp.module.never, ddp.module.sometimes
    return [never.bias.grad, bool((never.weight.grad == 3).all()), sometimes.weight.grad.tolist()]


def test_globally_unused_gradients_stay_and_locally_unused_gradients_get_the_mean() -> None:
    first, second = run_ranks(unused_gradients, 2)
    assert first[0] is None
    assert first[1]
    assert first[2] == second[2]
    assert any(any(row) for row in first[2])


def test_unused_parameters_without_the_flag_raise_the_same_error_on_every_rank() -> None:
    messages = run_ranks(unused_error, 2)
    assert messages[0] == messages[1]
    assert messages[0].startswith("UnusedParametersError")
    assert "never.weight (rank 0, 1)" in messages[0]
    assert "sometimes.weight (rank 1)" in messages[0]
    assert "head" not in messages[0]


def real_nan(rank: int, world_size: int) -> bool:
    ddp = DistributedDataParallel(build("transformer"))
    (ddp(MODELS["transformer"].batch(rank, 0)).sum() * float("nan")).backward()
    return bool(torch.isnan(grad(next(ddp.parameters()))).any())


def test_a_nan_gradient_of_the_model_is_not_reported_as_an_unused_parameter() -> None:
    assert run_ranks(real_nan, 2) == [True, True]


def copies(rank: int, world_size: int) -> list[bool]:
    import copy
    import io

    ddp = DistributedDataParallel(build("transformer"), **CAPS)
    results = [isinstance(ddp, TorchDDP), all(key.startswith("module.") for key in ddp.state_dict())]
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        trained = train(twin, "transformer", rank, 2, True)
        again = train(DistributedDataParallel(build("transformer"), **CAPS), "transformer", rank, 2, True)
        results.append(all(torch.equal(a, b) for a, b in zip(trained, again, strict=True)))
    buffer = io.BytesIO()
    torch.save(ddp.state_dict(), buffer)
    return results


def test_the_module_is_a_torch_ddp_and_can_be_copied_and_pickled() -> None:
    assert run_ranks(copies, 2) == [[True] * 4] * 2


def tokens_in_pickles(rank: int, world_size: int) -> list[bool]:
    with sending() as capture:
        ddp = DistributedDataParallel(build("transformer"), telemetry=replace(capture.config, token="s3cret"))
        pickled = pickle.dumps(ddp)
        os.environ["DDPOBS_TOKEN"] = "token-of-this-process"
        unpickled = pickle.loads(pickled)
    return [b"s3cret" not in pickled, unpickled._telemetry_config.token == "token-of-this-process"]


def test_no_token_is_pickled() -> None:
    assert run_ranks(tokens_in_pickles, 1) == [[True, True]]


def equal_with_hooks(rank: int, world_size: int) -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    same = True
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, powerSGD_hook.powerSGD_hook):
        results = []
        for kind in (TorchDDP, DistributedDataParallel):
            # One bucket, and no map of unused parameters: PowerSGD starts collectives from callbacks, which race with
            # all other collectives. Torch's DDP crashes on gloo with `find_unused_parameters`.
            ddp = kind(build("transformer"))
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3) if "power" in hook.__name__ else None
            ddp.register_comm_hook(state, hook)
            results.append(train(ddp, "transformer", rank, 6, True))
        same &= all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))
    return same


def test_torchs_own_comm_hooks_run_unchanged() -> None:
    assert run_ranks(equal_with_hooks, 2) == [True, True]


def equal_under_join(rank: int, world_size: int) -> bool:
    same = True
    flag = {"find_unused_parameters": True}
    for options in (CAPS, CAPS | flag):
        results = []
        for kind in (TorchDDP, DistributedDataParallel):
            ddp = kind(build("transformer"), **options)
            with ddp.join():
                results.append(train(ddp, "transformer", rank, 4 + 3 * rank, True))
        same &= all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))
    return same


def test_uneven_inputs_under_join_train_as_with_torch() -> None:
    assert run_ranks(equal_under_join, 2) == [True, True]


def equal_with_sparse_gradients(rank: int, world_size: int) -> bool:
    results = []
    for kind in (TorchDDP, DistributedDataParallel):
        torch.manual_seed(3)
        ddp = kind(torch.nn.Sequential(torch.nn.Embedding(20, 8, sparse=True), torch.nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            ddp(torch.tensor([rank, step + 2, 5, 5])).pow(2).mean().backward()
            optimizer.step()
        results.append([tensor for p in ddp.parameters() for tensor in (p.detach(), grad(p).to_dense())])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_sparse_gradients_are_reduced_as_by_torch(world_size: int) -> None:
    assert all(run_ranks(equal_with_sparse_gradients, world_size))
