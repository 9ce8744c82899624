from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from ddpobs_server.reports import liveness, run_state
from ddpobs_server.store import Store
from ddpobs_server.web import authenticator
from sqlalchemy import make_url

from benchmarks.rig import databases
from benchmarks.rig.collector import Collector, collector
from tests.support.chromium import chromium
from tests.support.server.browsing import EVIL, batch, put
from tests.support.server.statement_counts import assert_spreads, recorded


@pytest.fixture(scope="session")
def server_of_postgresql() -> Iterator[Any]:
    """A PostgreSQL server of the tests."""
    with databases.postgresql_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgresql(server_of_postgresql: Any) -> databases.Fresh:
    """Creates empty databases of PostgreSQL."""
    return lambda _: databases.new_database(server_of_postgresql)


@pytest.fixture(scope="session")
def migrated_postgresql(server_of_postgresql: Any, postgresql: databases.Fresh, tmp_path_factory: Any) -> Any:
    """Creates copies of a database of PostgreSQL with this version's schema."""
    url = postgresql(tmp_path_factory.getbasetemp())
    store = Store(url)
    store.migrate()
    store.close()
    return lambda _: databases.new_database(server_of_postgresql, f"TEMPLATE {make_url(url).database}")


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def fresh(request: pytest.FixtureRequest) -> databases.Fresh:
    """Creates empty databases, of SQLite and then of PostgreSQL."""
    if request.param == "sqlite":
        return databases.sqlite
    create: databases.Fresh = request.getfixturevalue("postgresql")
    return create


@pytest.fixture(scope="session")
def migrated(fresh: databases.Fresh, request: pytest.FixtureRequest) -> databases.Fresh:
    """Creates databases with this version's schema, as `fresh` creates empty ones."""
    if fresh is databases.sqlite:
        return databases.migrated_sqlite
    create: databases.Fresh = request.getfixturevalue("migrated_postgresql")
    return create


@pytest.fixture(scope="session")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with _collector_on(databases.migrated_sqlite, tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="session")
def on_postgresql(
    migrated_postgresql: databases.Fresh, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Collector]:
    with _collector_on(migrated_postgresql, tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="session")
def shared(fresh: databases.Fresh, request: pytest.FixtureRequest) -> Collector:
    """One real collector on each database, for all tests that use only a run of their own. None is lost."""
    running: Collector = request.getfixturevalue("on_sqlite" if fresh is databases.sqlite else "on_postgresql")
    return running


@pytest.fixture
def store(migrated: databases.Fresh, tmp_path: Path) -> Iterator[Store]:
    """An empty store on each database; checks that each of its statements reads by run."""
    store = Store(migrated(tmp_path))
    with recorded(store._engine) as statements:
        yield store
    store.close()
    for statement in set(statements):
        assert_spreads(statement)


@pytest.fixture
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a collector has read become old by changes alone, however long a busy machine takes."""
    monkeypatch.setattr(run_state, "_FRESH_NS", 2**62)
    monkeypatch.setattr(run_state, "_is_silent", lambda *_: False)
    monkeypatch.setattr(liveness, "PULSE_SILENCE_NS", 2**62)
    monkeypatch.setattr(authenticator, "_CACHE_S", float("inf"))


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A run id that no other test uses."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:128]


def _collector_on(create: databases.Fresh, folders: pytest.TempPathFactory) -> AbstractContextManager[Collector]:
    folder = folders.mktemp("collector")
    return collector(folder, database_url=create(folder), lost_after_s=3600, stalled_after_s=3600)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A collector with a run that stays running, however long a busy machine takes."""
    with collector(tmp_path_factory.mktemp("page"), lost_after_s=3600, stalled_after_s=3600) as running:
        for rank in range(2):
            put(running.url, batch("picture", rank, slow=rank == 1, host=EVIL))
        yield running.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(autouse=True)
def _pages_close(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close the pages that a test opens: the page of a live run goes on reading and drawing."""
    contexts = request.getfixturevalue("browser").contexts if "browser" in request.fixturenames else []
    yield
    if "browser" in request.fixturenames:
        for context in request.getfixturevalue("browser").contexts:
            if context not in contexts:
                context.close()
