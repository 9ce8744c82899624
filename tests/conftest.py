"""What all tests share."""

from __future__ import annotations

import os
from functools import cache

import httpx._transports.default as transports
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import settings

FIRST = (
    "test_faults.py",
    "test_benchmarks.py",
    "test_tokens.py",
    "test_comm_life.py",
    "test_delivery.py",
    "test_connections.py",
    "test_frameworks.py",
    "test_page.py",
    "test_run_command.py",
    "test_page_requests.py",
    "test_equal_to_torch.py",
    "test_attach.py",
    "test_comm.py",
)
"""Files that take the longest: where files run side by side, nobody waits for the last of them. Between those that want
both cores are some that mostly wait."""

# Machines are noisy: no test fails for being slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Each `httpx.get` would read all authorities' certificates, which takes longer than most of the answers.
transports.create_ssl_context = cache(transports.create_ssl_context)

# An answer may take longer than httpx's five seconds on a full machine: a test that limits it says so.
for name in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, name, 60.0)


@pytest.fixture(scope="session", autouse=True)
def _spool(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a test's rank could not deliver is no batch of whoever runs the tests."""
    os.environ["DDPOBS_SPOOL"] = str(tmp_path_factory.mktemp("spool"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("alone") and "integration" not in item.path.parts:
            raise pytest.UsageError(f"{item.nodeid}: `make test` looks for what runs alone in tests/integration only")
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
