"""Schema migrations, run by Alembic; a lock lets collectors migrate one at a time."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, func, inspect, literal, select

from ddpobs_server.store.database.database_errors import OtherSchemaError, UnusableError
from ddpobs_server.store.database.sql import execute_one

_log = logging.getLogger(__name__)
_MIGRATIONS = Path(__file__).parents[1] / "migrations"
_LOCK = 0xDD90B5
"""Advisory lock of a PostgreSQL database: a migration holds it alone, transactions with batches share it."""
_LOCK_S = 8
"""Seconds; a rank waits 10 s for a response (`DDPOBS_TIMEOUT_S`), and the batches of other runs wait too."""
_INCREMENTAL = 2


def migrate(engine: Engine) -> None:
    """Upgrade the schema from any earlier revision to this version's.

    Raises:
        UnusableError: A newer version created the schema, or the file holds other tables.
    """
    with engine.begin() as connection:
        # Another collector may start at the same time. An interrupted migration must leave no trace.
        if engine.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        else:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # Python's driver opens no transaction for CREATE TABLE.
        revision = _revision(connection)
        if revision is not None and revision not in earlier_revisions():
            raise UnusableError(f"the schema is at {revision}, which a newer version made: upgrade this one")
        config = _alembic()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        head = _revision(connection)
    if revision not in (None, head):
        _log.info("database schema upgraded from %s to %s", revision, head)
    if engine.dialect.name == "sqlite":
        _enable_incremental_vacuum(engine)


def revisions(engine: Engine) -> tuple[str | None, str | None]:
    """Schema revision of the database, and this version's.

    Raises:
        UnusableError: The file holds other tables.
    """
    with engine.connect() as connection:
        current = _revision(connection)
    return current, _head()


def wait_for_migration(connection: Connection) -> None:
    """Wait until no migration runs, and let none begin before the end of the transaction.

    A migration would convert the sums that it sees, and then remove those of this transaction with their table. SQLite
    has one writer. On PostgreSQL the transaction waits at most `_LOCK_S` for this lock and for each later one. Citus
    sends only `SET LOCAL` to its other nodes, and only with `citus.propagate_set_commands`, which others ignore.
    """
    if connection.dialect.name == "postgresql":
        limit = func.set_config("lock_timeout", f"{_LOCK_S}s", literal(value=True))  # Until the transaction's end.
        to_nodes = func.set_config("citus.propagate_set_commands", "local", literal(value=True))
        connection.execute(select(limit, to_nodes, func.pg_advisory_xact_lock_shared(_LOCK)))
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_S}s'")


def check(connection: Connection) -> None:
    """Check that the schema is this version's: an older version must not write into a newer schema.

    Raises:
        OtherSchemaError: Another version changed it.
    """
    rows = execute_one(connection, "SELECT version_num FROM alembic_version", ())
    current = rows[0][0] if rows else None
    if current != _head():
        raise OtherSchemaError(current, _head())


@cache
def _head() -> str | None:
    return ScriptDirectory.from_config(_alembic()).get_current_head()


def _revision(connection: Connection) -> str | None:
    current = MigrationContext.configure(connection).get_current_revision()
    if current is None and connection.dialect.name == "sqlite" and (tables := inspect(connection).get_table_names()):
        raise UnusableError(f"the file holds tables of another program ({', '.join(tables[:3])}): name another file")
    return current


def earlier_revisions() -> set[str]:
    """Schema revisions that this version can upgrade, including its own."""
    return {script.revision for script in ScriptDirectory.from_config(_alembic()).walk_revisions()}


def _enable_incremental_vacuum(engine: Engine) -> None:
    """Rewrite a file of the first version once: in its form a file never returns free space."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one() != _INCREMENTAL:
            connection.exec_driver_sql("PRAGMA auto_vacuum=INCREMENTAL")
            connection.exec_driver_sql("VACUUM")


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config
