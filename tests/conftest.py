"""Settings of all tests."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from unittest import mock

import httpx._transports.default as transports
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG, create_ssl_context
from hypothesis import settings

from benchmarks.faults import launch
from benchmarks.rig import collector, databases, leftovers, patience
from tests.support.longest_files import FIRST

ROOT = Path(__file__).resolve().parents[1]

# Machines are noisy: no example fails because it is slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Otherwise each `httpx.get` reads the certificates of all authorities, which takes longer than most answers.
mock.patch.object(transports, "create_ssl_context", cache(create_ssl_context)).start()

# On a busy machine an answer may take longer than httpx's five seconds; a test with a limit sets its own.
for name in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, name, patience.HANG_S)


_mark = os.environ[leftovers.MARK] = leftovers.new_mark()


@pytest.fixture(scope="session", autouse=True)
def _nothing_remains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """End all processes that tests of this process started, and fail if one still runs that belongs to no session."""
    yield
    _end_servers()
    folders = (tmp_path_factory.getbasetemp(), Path(tempfile.gettempdir(), databases.folder_prefix()))
    if remaining := leftovers.remove(_mark, folders):
        pytest.fail("tests left behind: " + "; ".join(remaining))


def _end_servers() -> None:
    """End what serves a whole session: processes that fork ranks, a file to copy, and multiprocessing's tracker."""
    for server in (launch.fork_server, collector.fork_server):
        if server.cache_info().currsize:
            server().close()
            server.cache_clear()
    if databases.template.cache_info().currsize:
        databases.template().cleanup()
        databases.template.cache_clear()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def _spool(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep undelivered batches of the tests out of the user's spool."""
    os.environ["DDPOBS_SPOOL"] = str(tmp_path_factory.mktemp("spool"))


def pytest_configure() -> None:
    """Let SIGTERM end the session in order, so that every test takes down what it started."""
    owner = os.getpid()

    def end(number: int, _frame: object) -> None:
        if os.getpid() == owner:
            pytest.exit(f"signal {number}", 128 + number)
        signal.signal(number, signal.SIG_DFL)  # A process that this one forked.
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # As a shell's background job; trainings are interrupted.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what is left of workers that were killed; where this process itself ran the tests, nothing is."""
    if os.environ.get("PYTEST_XDIST_WORKER") is None and (remaining := leftovers.remove(_mark, ())):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        print("\nworkers left behind: " + "; ".join(remaining), file=sys.stderr)  # noqa: T201


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("alone") and "integration" not in item.path.parts:
            raise pytest.UsageError(f"{item.nodeid}: `make test` runs tests marked alone in tests/integration only")
    order = {ROOT / path: index for index, path in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
