"""The migrations make the schema that the store uses."""

from __future__ import annotations

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from ddpobs_server.store import Store, schema
from sqlalchemy import create_engine

from benchmarks.rig.databases import Fresh


def test_migrations_create_exactly_the_schema_of_the_store(fresh: Fresh, tmp_path: Path) -> None:
    url = fresh(tmp_path)
    for _ in range(2):
        store = Store(url)
        store.migrate()
        store.close()
    with create_engine(url).connect() as connection:
        context = MigrationContext.configure(connection)
        assert context.get_current_revision() is not None
        assert compare_metadata(context, schema.metadata) == []
