"""`bucket_cap_mb="auto"`: candidates are tried by all ranks in the same steps, and kept only if they are faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpobs import DistributedDataParallel
from ddpobs.comm import AllReduce
from ddpobs.errors import ConfigError, ModelsDifferError
from ddpobs.reducer import auto_caps, caps_sample, caps_trial
from ddpobs.reducer.auto_caps import AutoCaps
from ddpobs.whatif import Fitted, Observed, fit
from tests.support.distributed.launch import run_ranks

_WIDTH, _FIRST_BYTES = 64, 20_000
"""A layer has 16.6 kB, so that the first bucket ends inside the model."""
_ONE, _EACH = [1 << 30], [1]
"""Limits of one bucket, and of a bucket for each parameter."""
_SLOW_S = 0.01


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))


def _train(model: nn.Module, rank: int, steps: int, before: Callable[[int], None] = lambda _: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.Generator().manual_seed(rank)
    for step in range(steps):
        before(step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(torch.randn(2, _WIDTH, generator=inputs)).pow(2).mean().backward()
        optimizer.step()


Reports = list[tuple[str, int, dict[str, Any]]]


def _tuned(limits: list[list[int]], **options: Any) -> tuple[DistributedDataParallel, Reports, Any]:
    """A module that tries these limits, and the list of what it reports: outcome, number of the backward, detail."""
    reports: Reports = []

    def report(caps: AutoCaps, outcome: str, **detail: Any) -> None:
        reports.append((outcome, caps._backwards, detail))

    patches: list[Any] = [
        patch.object(caps_sample, "_limits", lambda _: limits),
        patch.object(AutoCaps, "_report", report),
        patch.object(auto_caps, "LOOK_EVERY", 64),
        patch.object(caps_trial, "BLOCK_STEPS", 4),
        patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", _FIRST_BYTES),
    ]
    for each in patches:
        each.start()
    model = DistributedDataParallel(_model(), bucket_cap_mb="auto", **options)
    return model, reports, patches


def _slow_launches() -> None:
    """Each bucket takes 10 ms more, whatever its size: few buckets are the fastest."""
    launch = AllReduce.launch

    def slow(self: AllReduce, bucket: Any, last: bool) -> Any:
        time.sleep(_SLOW_S)
        return launch(self, bucket, last)

    patch.object(AllReduce, "launch", slow).start()


def _bits(rank: int, _: int, as_views: bool) -> tuple[bool, Reports, int]:
    """Whether the parameters equal those of torch's DDP after every kind of change."""
    model, reports, _patches = _tuned([_ONE, _EACH], gradient_as_bucket_view=as_views)
    torchs = nn.parallel.DistributedDataParallel(_model())
    _train(model, rank, 280)
    _train(torchs, rank, 280)
    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), torchs.parameters(), strict=True))
    return equal, reports, len(model.reducer.bucket_bytes)


def _agreed(reports: Reports) -> Reports:
    """The reports without the times before and after a shift: each rank's are its own."""
    own = ("before_ns", "after_ns")
    return [
        (outcome, step, {name: value for name, value in detail.items() if name not in own})
        for outcome, step, detail in reports
    ]


@pytest.mark.parametrize("as_views", [False, True])
def test_parameters_stay_bit_for_bit_those_of_torchs_ddp(as_views: bool) -> None:
    results = run_ranks(_bits, 2, as_views)
    assert [equal for equal, *_ in results] == [True, True]
    agreed = [(_agreed(reports), buckets) for _, reports, buckets in results]
    assert agreed[0] == agreed[1], "both ranks change their buckets in the same steps, by the same ratio"
    outcomes = [outcome for outcome, *_ in results[0][1]]
    assert outcomes.count("tried") >= 2
    decided = outcomes.count("kept") + outcomes.count("undone")
    assert decided <= outcomes.count("tried") <= decided + 1, "one trial may be under way"


def _proof(rank: int, _: int, limits: list[list[int]]) -> tuple[list[str], list[int]]:
    _slow_launches()
    model, reports, _patches = _tuned(limits)
    _train(model, rank, 260)
    return [outcome for outcome, *_ in reports], model.reducer.bucket_bytes


def test_a_faster_candidate_is_kept_and_a_slower_one_is_undone() -> None:
    """One bucket saves a launch of two; a bucket for each parameter adds seven."""
    for outcomes, sizes in run_ranks(_proof, 2, [_ONE, _EACH]):
        assert outcomes == ["tried", "kept", "tried", "undone"]
        assert len(sizes) == 1


def _plan(rank: int, _: int) -> list[tuple[int, int, bool]]:
    """World size, bytes and whether arrivals rise, of each fit on this rank."""
    fits: list[tuple[int, int, bool]] = []

    def limits(fitted: Fitted) -> list[list[int]]:
        typical = fitted.typical
        rises = bool((np.diff(typical.arrival_ns) >= 0).all() and typical.arrival_ns[-1] > 0)
        fits.append((fitted.world_size, int(typical.sizes.sum()), rises))
        return []

    with patch.object(caps_sample, "_limits", limits):
        _train(DistributedDataParallel(_model(), bucket_cap_mb="auto"), rank, auto_caps.WARM_UP + auto_caps.SAMPLED + 3)
    return fits


def test_rank_0_alone_plans_from_the_sample_of_all_ranks() -> None:
    size = 4 * sum(parameter.numel() for parameter in _model().parameters())
    assert run_ranks(_plan, 2) == [[(2, size, True)], []]


def _alone(rank: int, _: int) -> tuple[Reports, list[float]]:
    """Rank 0 alone runs further forwards with gradients, also whenever something is due."""
    model, reports, _patches = _tuned([_EACH])

    def before(step: int) -> None:
        if rank == 0 and step > 2:
            model(torch.randn(2, _WIDTH)).sum()

    _train(model, rank, 70, before)
    return reports, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_a_forward_on_one_rank_alone_changes_nothing() -> None:
    (first, ours), (second, theirs) = run_ranks(_alone, 2)
    assert first == second
    assert first[0][0] == "tried"
    assert ours == theirs


def _failing(rank: int, _: int) -> list[str]:
    model, reports, _patches = _tuned([])
    with patch.object(caps_sample, "_limits", side_effect=ZeroDivisionError):
        _train(model, rank, auto_caps.WARM_UP + auto_caps.SAMPLED + 3)
    return [outcome for outcome, *_ in reports]


def test_a_plan_that_fails_on_rank_0_leaves_the_buckets_as_they_are() -> None:
    assert run_ranks(_failing, 2) == [[], []]


def test_candidates_are_those_that_the_model_predicts_to_be_faster() -> None:
    """Ten buckets whose transfers are mostly latency: fewer are faster."""
    ready_ns = np.tile(np.arange(10.0) * 1e6, (40, 1))
    sizes = np.array([0.25, 2.0] * 5) * 2**20
    moving_ns = 5e6 + 0.1 * np.tile(sizes, (40, 1))
    exposed_ns = np.full(40, float(moving_ns[0].sum() - 9e6))
    fitted = fit(
        Observed(
            step_ns=np.full(40, 80e6),
            ready_ns=ready_ns,
            moving_ns=moving_ns,
            done_ns=np.cumsum(moving_ns, axis=1),
            bucket_bytes=sizes,
            exposed_ns=exposed_ns,
            world_size=2,
        )
    )
    assert isinstance(fitted, Fitted)
    first, second = caps_sample._limits(fitted)
    assert sum(sizes) / first[0] < 5
    assert first != second


def _shift(rank: int, _: int) -> list[str]:
    model, reports, _patches = _tuned([])

    def before(step: int) -> None:
        if step > 100:
            time.sleep(0.05)

    _train(model, rank, 190, before)
    return [outcome for outcome, *_ in reports]


def test_a_step_of_another_length_lets_all_ranks_sample_again() -> None:
    first, second = run_ranks(_shift, 2)
    assert first == second
    assert first[0] == "shifted"


def _stopped(rank: int, _: int) -> tuple[list[str], list[int]]:
    model, reports, _patches = _tuned([_EACH])
    _train(model, rank, 5)
    model.register_comm_hook(dist.group.WORLD, lambda _, bucket: _averaged(bucket))
    _train(model, rank, 60)
    return [outcome for outcome, *_ in reports], model.reducer.bucket_bytes


def _averaged(bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_a_communication_hook_ends_it() -> None:
    for outcomes, sizes in run_ranks(_stopped, 2):
        assert outcomes == ["stopped"]
        assert len(sizes) == 2


def _dies(rank: int, _: int) -> str:
    """Rank 1 ends in the middle of a trial; rank 0 gets an error instead of waiting for ever."""
    model, _reports, _patches = _tuned([_EACH])
    steps = auto_caps.WARM_UP + auto_caps.SAMPLED + caps_trial.BLOCK_STEPS + 2
    if rank:
        _train(model, rank, steps)
        return "ended"
    try:
        _train(model, rank, 10 * steps)
    except RuntimeError:
        return "error"
    return "went on"


def test_a_rank_that_ends_in_a_trial_ends_the_others_with_an_error() -> None:
    assert run_ranks(_dies, 2) == ["error", "ended"]


def _uneven(rank: int, _: int) -> tuple[Reports, list[float]]:
    """Rank 1 is out of data in the sample."""
    model, reports, _patches = _tuned([_EACH])
    with model.join():
        _train(model, rank, 20 if rank else 120)
    return reports, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_a_rank_out_of_data_changes_its_buckets_with_the_others() -> None:
    (first, ours), (second, theirs) = run_ranks(_uneven, 2)
    assert first == second
    assert [outcome for outcome, *_ in first][:1] == ["tried"]
    assert ours == theirs


def _refused(rank: int, _: int, options: dict[str, Any]) -> str:
    try:
        DistributedDataParallel(_model(), **options)
    except (ConfigError, ModelsDifferError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("static_graph", {"static_graph": True}),
        ("find_unused_parameters", {"find_unused_parameters": True}),
        ("comm", {"comm": "fp16"}),
        ("round_robin_groups", {"round_robin_groups": 2}),
        ("bucket_cap_mb", {"bucket_cap_mb": "best"}),
    ],
)
def test_what_cannot_be_together_with_it_is_refused_by_name(name: str, options: dict[str, Any]) -> None:
    for message in run_ranks(_refused, 1, {"bucket_cap_mb": "auto", **options}):
        assert name in message
