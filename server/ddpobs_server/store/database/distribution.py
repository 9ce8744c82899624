"""Distribution of the tables over a Citus cluster, by run."""

from __future__ import annotations

from sqlalchemy import Engine

from ddpobs_server.store import schema
from ddpobs_server.store.database import migration
from ddpobs_server.store.database.database_errors import UnusableError


def statements() -> list[str]:
    """Statements that distribute the tables. A single node then answers each query."""
    tables = [table.name for table in schema.metadata.sorted_tables if table not in schema.REFERENCE_TABLES]
    by_run = [f"SELECT create_distributed_table('{name}', 'run_id')" for name in tables]
    return [*by_run, *(f"SELECT create_reference_table('{table.name}')" for table in schema.REFERENCE_TABLES)]


def distribute(engine: Engine) -> None:
    """Run `statements` for the tables that are not distributed yet; an upgrade may add tables.

    Raises:
        UnusableError: The database is not PostgreSQL.
        SQLAlchemyError: The database has no Citus.
    """
    if engine.dialect.name != "postgresql":
        raise UnusableError(f"expected a PostgreSQL database with Citus, got {engine.dialect.name}")
    migration.migrate(engine)
    with engine.begin() as connection:
        distributed = connection.exec_driver_sql("SELECT logicalrelid::text FROM pg_dist_partition").scalars().all()
        for statement in statements():
            if statement.split("'")[1] not in distributed:
                connection.exec_driver_sql(statement)
