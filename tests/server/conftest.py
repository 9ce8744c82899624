from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collector import Collector, collector


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """One real collector for all tests that keep to a run of their own."""
    with collector(tmp_path_factory.mktemp("collector")) as running:
        yield running


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A run id that no other test has."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:128]
