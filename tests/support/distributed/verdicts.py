"""The verdicts of the tests that compare our DDP with torch's, case by case."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.support.distributed.compare import verdicts
from tests.support.distributed.launch import run_ranks


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.wide)])
def verdicts_by_rank(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Each rank's verdicts on the module's `CASES`, on two ranks and on four.

    `test_patterns.py`, `test_equal_to_torch.py` and `test_strategies.py` have four ranks in `make test`, too.
    """
    return run_ranks(judge_cases, request.param, request.module.__name__)


def judge_cases(rank: int, world_size: int, module: str) -> dict[str, str]:
    return verdicts(import_module(module).CASES, rank)
