"""A collector for the whole session, and one training with a slow rank in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collector import collector
from tests.integration.training import TORCHRUN, train

SLOW_RANK = 1


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a collector."""
    with collector(tmp_path_factory.mktemp("collector")) as running:
        yield running.url


@pytest.fixture(scope="session")
def slow_run(url: str) -> str:
    """A run whose rank 1 is slow in backward."""
    train(url, "slow-in-backward", slow_rank=SLOW_RANK, phase="backward", steps=80, launcher=TORCHRUN, flush_s=0.5)
    return "slow-in-backward"
