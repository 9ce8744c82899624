"""Fixtures of the whole session: a collector, and a training with a slow rank."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from benchmarks.rig.collector import collector
from benchmarks.rig.training import TORCHRUN, train
from tests.support.integration.slow_ranks import SLOW_RANK


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a collector, whose work waits for that of the ranks: they share the processors with it."""
    with collector(tmp_path_factory.mktemp("collector"), public_url="https://ddpobs.example") as running:
        os.setpriority(os.PRIO_PGRP, running.process.pid, 19)
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
