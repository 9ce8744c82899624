"""The link's model, with as many sizes of buckets as a client may send."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ddpobs.whatif.link import fit_link


def test_ten_thousand_sizes_are_fitted_in_little_memory() -> None:
    sizes = 1e5 * np.arange(1, 10_001)
    times_ns = 50_000 + 0.1 * sizes
    tracemalloc.start()
    model = fit_link(np.repeat(sizes, 3), np.repeat(times_ns, 3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
    assert model.alpha_ns == pytest.approx(50_000)
    assert model.beta_ns == pytest.approx(0.1)
