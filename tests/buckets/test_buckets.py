"""Buckets have the same members as torch's, and gradients are views of them."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddpobs.buckets import assignment
from ddpobs.buckets import bucket as bucketing
from ddpobs.buckets.bucket import Bucket
from tests.support.distributed.compare import grad


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def dense(count: int) -> list[bool]:
    return [False] * count


def bucket_of(*sizes: int) -> Bucket:
    model = parameters(*sizes)
    return bucketing.build(model, [list(range(len(model)))], dense(len(model)))[0]


def test_the_last_defined_parameters_come_first_and_a_bucket_closes_at_its_limit() -> None:
    # 4 bytes an element: 10 elements reach 40 bytes.
    assert assignment.assign(parameters(5, 5, 5, 5), [40], dense(4)) == [[2, 3], [0, 1]]
    assert assignment.assign(parameters(5, 5, 5, 9), [40], dense(4))[-1] == [0, 1]


def test_a_small_first_limit_holds_for_the_first_bucket() -> None:
    assert assignment.assign_in_order(parameters(5, 5, 5, 5), [3, 2, 1, 0], [20, 60], dense(4)) == [[3], [2, 1, 0]]


def test_parameters_of_another_dtype_get_their_own_bucket() -> None:
    mixed = parameters(4, 4) + parameters(4, dtype=torch.float64)
    assert sorted(map(sorted, assignment.assign(mixed, [10_000], dense(3)))) == [[0, 1], [2]]


def test_a_sparse_gradient_gets_its_own_bucket() -> None:
    assert sorted(assignment.assign(parameters(4, 4, 4), [10_000], [False, True, False])) == [[0, 2], [1]]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(4, 400), st.randoms(use_true_random=False))
def test_every_parameter_is_in_one_bucket_in_the_given_order(sizes: list[int], limit: int, random: Random) -> None:
    model = parameters(*sizes)
    order = list(range(len(model)))
    random.shuffle(order)
    buckets = assignment.assign_in_order(model, order, [limit], dense(len(model)))
    assert [member for members in buckets for member in members] == order
    for members in buckets[:-1]:
        assert sum(sizes[m] for m in members) * 4 >= limit > sum(sizes[m] for m in members[:-1]) * 4


def test_gradients_become_views_of_the_buffer_and_are_divided_once() -> None:
    bucket = bucket_of(3, 2)
    for parameter in bucket.parameters:
        parameter.grad = torch.full_like(parameter, 4.0)
    bucket.divisor = 2.0
    bucket.fill()
    assert bucket.buffer.tolist() == [2.0] * 5
    assert all(p.grad is view for p, view in zip(bucket.parameters, bucket.views, strict=True))
    bucket.fill()
    assert bucket.buffer.tolist() == [1.0] * 5, "a gradient accumulated in place is there already"


def test_a_parameter_without_gradient_counts_as_zero_and_keeps_having_none() -> None:
    bucket = bucket_of(3, 2)
    bucket.buffer.fill_(9)
    bucket.parameters[1].grad = torch.ones(2)
    bucket.fill()
    assert bucket.buffer.tolist() == [0, 0, 0, 1, 1]
    assert bucket.parameters[0].grad is None


@pytest.mark.parametrize("in_place", [True, False])
def test_a_gradient_copied_on_arrival_is_not_divided_again_when_the_bucket_is_full(in_place: bool) -> None:
    bucket = bucket_of(2, 2)
    bucket.parameters[1].grad = torch.full((2,), 8.0)
    bucket.parameters[0].grad = bucket.views[0].fill_(8.0) if in_place else torch.full((2,), 8.0)
    bucket.divisor = 2.0
    bucket.copy_in(0, bucket.parameters[0])
    bucket.fill()
    assert bucket.buffer.tolist() == [4.0] * 4
    bucket.reset()
    bucket.fill()
    assert bucket.buffer.tolist() == [2.0] * 4


@pytest.mark.parametrize("slots", [(), (0, 1, 2)], ids=["together", "on arrival"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_a_third_of_a_gradient_equals_torchs_to_the_bit(dtype: torch.dtype, slots: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((), (5,), (70, 70))]
    bucket = bucketing.build(model, [[0, 1, 2]], dense(3))[0]
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    expected = [parameter.grad * (1 / 3) for parameter in model if parameter.grad is not None]
    with torch.device("meta"):  # The default device has no influence.
        bucket.divisor = 3.0
    for slot in slots:
        bucket.copy_in(slot, model[slot])
    bucket.fill()
    assert all(torch.equal(view, result) for view, result in zip(bucket.views, expected, strict=True))


def test_a_view_has_its_parameters_strides() -> None:
    channels_last = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    transposed = nn.Parameter(torch.randn(6, 7).t())
    sliced = nn.Parameter(torch.randn(8, 8)[:, ::2])
    model = [channels_last, transposed, sliced]
    bucket = bucketing.build(model, [[0, 1, 2]], dense(3))[0]
    for parameter, view in zip(model, bucket.views, strict=True):
        parameter.grad = parameter.detach().clone()
        assert view.shape == parameter.shape
    assert bucket.views[0].stride() == channels_last.stride()
    assert bucket.views[1].stride() == transposed.stride()
    bucket.fill()
    assert all(torch.equal(grad(p), p) for p in model)
    assert bucket.buffer.numel() == sum(p.numel() for p in model)


def test_a_bucket_describes_itself_in_bytes_and_names() -> None:
    model = parameters(3, 2, dtype=torch.float64)
    described = bucketing.build(model, [[1, 0]], dense(2))[0].describe(["first", "second"])
    assert (described.size_bytes, described.dtype) == (40, "float64")
    assert [(p.name, p.size) for p in described.parameters] == [("second", 2), ("first", 3)]


def test_a_large_group_gets_a_bucket_of_its_own_in_the_order_of_its_last_gradient() -> None:
    groups = ["a", None, "a", "b", None, "c"]
    buckets = [[0, 1, 3, 2], [4, 5]]
    assert assignment.separate(buckets, groups, [4, 4, 4, 4, 4, 9], least_bytes=8) == [[1, 3], [0, 2], [4], [5]]
