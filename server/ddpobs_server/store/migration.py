"""The schema's migrations, run by Alembic, and by one collector at a time."""

from __future__ import annotations

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, func, inspect, select

from ddpobs_server.store.database_errors import UnusableError

_log = logging.getLogger(__name__)
_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATING = 0xDD90B5
"""The lock that whoever migrates a PostgreSQL database holds."""
_INCREMENTAL = 2


def migrate(engine: Engine) -> None:
    """Bring the schema to this version's, from whatever earlier one is there.

    Raises:
        UnusableError: A newer version made it, or it is somebody else's file.
    """
    with engine.begin() as connection:
        # Another collector may start, too; and a step that is cut off leaves nothing behind.
        if engine.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_MIGRATING)))
        else:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # Python's driver begins for rows, not for tables.
        here = _revision(connection)
        if here is not None and here not in earlier_revisions():
            raise UnusableError(f"the schema is at {here}, which a newer version made: upgrade this one")
        config = _alembic()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        head = _revision(connection)
    if here not in (None, head):
        _log.info("database schema upgraded from %s to %s", here, head)
    if engine.dialect.name == "sqlite":
        _make_shrinkable(engine)


def revisions(engine: Engine) -> tuple[str | None, str | None]:
    """The schema's revision in the database, and this version's.

    Raises:
        UnusableError: It is somebody else's file.
    """
    with engine.connect() as connection:
        here = _revision(connection)
    return here, ScriptDirectory.from_config(_alembic()).get_current_head()


def _revision(connection: Connection) -> str | None:
    here = MigrationContext.configure(connection).get_current_revision()
    if here is None and connection.dialect.name == "sqlite" and (others := inspect(connection).get_table_names()):
        raise UnusableError(f"it holds tables of something else ({', '.join(others[:3])}): give another file")
    return here


def earlier_revisions() -> set[str]:
    """Revisions of the schema that this version can start from, its own included."""
    return {script.revision for script in ScriptDirectory.from_config(_alembic()).walk_revisions()}


def _make_shrinkable(engine: Engine) -> None:
    """A file of the first version never gives space back; it is written anew, once."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one() != _INCREMENTAL:
            connection.exec_driver_sql("PRAGMA auto_vacuum=INCREMENTAL")
            connection.exec_driver_sql("VACUUM")


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config
