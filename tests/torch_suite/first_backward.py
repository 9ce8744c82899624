"""Tests that expect torch's error one step late: in the forward that follows the faulty backward.

Our error is raised in that backward. So these tests run with a first backward that must raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ddpobs.errors import UnusedParametersError

EARLIER_ERRORS = frozenset(
    {
        "test_ddp_control_flow_different_across_ranks",
        "test_ddp_control_flow_same_across_ranks",
        "test_ddp_multiple_nested_unused_params_err_ignore_params",
        "test_ddp_multiple_nested_unused_params_error",
        "test_ddp_unused_params_rebuild_buckets_exception",
    }
)


@contextmanager
def first_backward_raises() -> Iterator[None]:
    """Catch the error of each faulty model's first backward; such a test gives each model two passes.

    Raises:
        AssertionError: A model's first backward did not raise.
    """
    backward = torch.autograd.backward
    errors = 0

    def catch_first(*args: Any, **kwargs: Any) -> None:
        nonlocal errors
        try:
            backward(*args, **kwargs)
        except UnusedParametersError:
            errors += 1
            if errors % 2 == 0:
                raise

    torch.autograd.backward = catch_first
    try:
        yield
    finally:
        torch.autograd.backward = backward
    assert errors, "no backward raised UnusedParametersError"
    assert errors % 2 == 0, "a model raised in one of its two passes only"
