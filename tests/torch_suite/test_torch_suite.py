"""Torch's own DDP tests, from its wheel, with our class in the place of torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.torch_suite.first_backward import EARLIER_ERRORS
from tests.torch_suite.launch import NAMES, Host


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as running:
        yield running


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_test_passes_with_our_class(name: str, host: Host) -> None:
    result = host.run(name)
    if result["outcome"] in ("missing", "skipped"):
        pytest.skip(f"TORCH'S TEST DID NOT RUN: {name} is {result['outcome']} in torch {torch.__version__}")
    assert result["outcome"] == "passed", result["output"]


def test_tests_with_a_raising_first_backward_are_listed_once() -> None:
    assert set(NAMES) >= EARLIER_ERRORS
    assert len(set(NAMES)) == len(NAMES) == 69


def test_a_test_that_torch_does_not_have_is_reported_as_missing(host: Host) -> None:
    assert host.run("test_of_a_later_version")["outcome"] == "missing"
