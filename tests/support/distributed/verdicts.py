"""The verdicts of the tests that compare our DDP with torch's, case by case."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.support.distributed.compare import verdicts
from tests.support.distributed.launch import run_ranks


@pytest.fixture(scope="module", params=[2, 4])
def verdicts_by_rank(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Each rank's verdicts on the module's `CASES`, on two ranks and on four."""
    return run_ranks(judge_cases, request.param, request.module.__name__)


def judge_cases(rank: int, world_size: int, module: str) -> dict[str, str]:
    return verdicts(import_module(module).CASES, rank)
