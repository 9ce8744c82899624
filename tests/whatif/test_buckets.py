"""Buckets are filled as torch fills them, and the best split is the best of all."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from ddpobs.buckets.assignment import assign_in_order
from ddpobs.whatif.buckets import MB, best_split, fill
from ddpobs.whatif.link import Link
from ddpobs.whatif.replay import replay


@pytest.mark.parametrize("caps", [(0.25,), (1.0,), (0.5, 2.0), (25.0,)])
def test_buckets_hold_the_parameters_that_torch_puts_there(caps: tuple[float, ...]) -> None:
    lengths = np.random.default_rng(0).integers(1, 200_000, 60)
    parameters = [torch.nn.Parameter(torch.zeros(int(length))) for length in lengths]
    limits = [int(cap * MB) for cap in caps]
    torchs = assign_in_order(parameters, range(60), limits, [False] * 60)
    ready, sizes = fill(np.arange(60.0), np.asarray(4.0 * lengths, np.float64), caps)
    assert ready.tolist() == [float(max(members)) for members in torchs]
    assert sizes.tolist() == [float(4 * lengths[members].sum()) for members in torchs]


def test_no_split_ends_sooner_than_the_best() -> None:
    generator = np.random.default_rng(2)
    for _ in range(5):
        arrival_ns = np.sort(generator.uniform(0, 1e7, 9))
        sizes, link = generator.uniform(1e4, 1e6, 9), Link(generator.uniform(1e4, 3e6), 8.0, is_separated=True)
        ends = []
        for cuts in (cuts for count in range(9) for cuts in combinations(range(1, 9), count)):
            begins = np.array([0, *cuts])
            ready, parts = np.maximum.reduceat(arrival_ns, begins), np.add.reduceat(sizes, begins)
            ends.append(replay(ready, parts, link).end_ns)
        limits = best_split(arrival_ns, sizes, link)
        found = fill(arrival_ns, sizes, limits)
        assert replay(*found, link).end_ns == pytest.approx(min(ends))


def test_no_bucket_waits_longer_than_the_bound() -> None:
    arrival_ns, sizes = np.linspace(0, 90, 10), np.full(10, 1e6)
    link = Link(1000.0, 0.0, is_separated=True)
    assert len(best_split(arrival_ns, sizes, link)) == 1
    assert len(best_split(arrival_ns, sizes, link, max_wait_ns=20.0)) == 4
