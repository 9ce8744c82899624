"""Distribution of the tables over a Citus cluster, by run."""

from __future__ import annotations

from sqlalchemy import Connection, Engine

from ddpobs_server.store import schema
from ddpobs_server.store.database import migration
from ddpobs_server.store.database.database_errors import UnusableError

_VERSION = "alembic_version"
"""Table of migrations. As a reference table it shows every node the revision: a collector may connect to any."""


def statements() -> list[str]:
    """Statements that distribute the tables. A single node then answers each query about one run."""
    references = {table.name for table in schema.REFERENCE_TABLES}
    others = [table.name for table in schema.metadata.sorted_tables if table.name not in {"runs", *references}]
    return [
        "SELECT create_distributed_table('runs', 'run_id')",
        *(f"SELECT create_distributed_table('{name}', 'run_id', colocate_with => 'runs')" for name in others),
        *(f"SELECT create_reference_table('{name}')" for name in sorted({_VERSION, *references})),
    ]


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
        distributed = _distributed(connection)
        for statement in statements():
            if statement.split("'")[1] not in distributed:
                connection.exec_driver_sql(statement)


def is_distributed(connection: Connection) -> bool:
    """Whether the tables are distributed over a cluster."""
    if connection.dialect.name != "postgresql":
        return False
    has_citus = connection.exec_driver_sql("SELECT to_regclass('pg_dist_partition') IS NOT NULL").scalar_one()
    return bool(has_citus) and "runs" in _distributed(connection)


def size_bytes(connection: Connection) -> int:
    """Size of the distributed tables on all nodes."""
    query = "SELECT sum(citus_total_relation_size(logicalrelid)) FROM pg_dist_partition"
    return int(connection.exec_driver_sql(query).scalar_one())


def broken_links(connection: Connection) -> list[str]:
    """Pairs of the cluster's nodes, `HOST:PORT to HOST:PORT`, of which the first cannot reach the second."""
    rows = connection.exec_driver_sql(
        "SELECT from_nodename, from_nodeport, to_nodename, to_nodeport FROM citus_check_cluster_node_health() "
        "WHERE result IS NOT TRUE"
    )
    return [f"{source}:{source_port} to {target}:{target_port}" for source, source_port, target, target_port in rows]


def _distributed(connection: Connection) -> set[str]:
    return set(connection.exec_driver_sql("SELECT logicalrelid::text FROM pg_dist_partition").scalars())
