"""Fixtures of the whole session: a collector, and a training with a slow rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.rig.collector import collector
from benchmarks.rig.training import TORCHRUN, train
from tests.support.integration.slow_ranks import SLOW_RANK


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a collector."""
    with collector(tmp_path_factory.mktemp("collector"), public_url="https://ddpobs.example") as running:
        yield running.url


@pytest.fixture(scope="session")
def slow_run_output(url: str) -> str:
    """Output of the training `slow_run`."""
    name = "slow-in-backward"
    return train(url, name, slow_rank=SLOW_RANK, phase="backward", steps=80, launcher=TORCHRUN, flush_s=0.5)


@pytest.fixture(scope="session")
def slow_run(slow_run_output: str) -> str:
    """Name of a run with rank 1 slow in backward."""
    return "slow-in-backward"
