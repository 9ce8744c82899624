"""Add the module and the number of names to unused sets; in SQLite, store narrow rows in key order."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = ("batches", "rollups", "bucket_rollups", "step_histogram", "peer_totals")


def upgrade() -> None:
    with op.batch_alter_table("unused") as unused:
        unused.add_column(sa.Column("module", sa.Integer(), nullable=False, server_default="0"))
        unused.add_column(sa.Column("names", sa.BigInteger(), nullable=False, server_default="0"))
    _fill(op.get_bind())
    with op.batch_alter_table("unused") as unused:
        unused.alter_column("module", server_default=None)
        unused.alter_column("names", server_default=None)
    _rebuild(with_rowid=False)


def downgrade() -> None:
    _rebuild(with_rowid=True)
    with op.batch_alter_table("unused") as unused:
        unused.drop_column("names")
        unused.drop_column("module")


def _fill(connection: sa.Connection) -> None:
    """Decode the bodies in Python: PostgreSQL rejects JSON text in which a name has a NUL.

    The rows are read source by source. If the set changes in every step, a source has some hundred thousand rows.
    """
    c = sa.column
    source: list[sa.ColumnClause[object]] = [c("run_id"), c("source")]
    key = [*source, c("seq"), c("position")]
    unused = sa.table("unused", *key, c("body"), c("module"), c("names"))
    same_key = [column == sa.bindparam(f"key_{column.name}") for column in key]
    values: dict[str, Any] = {"module": sa.bindparam("new_module"), "names": sa.bindparam("new_names")}
    fill = sa.update(unused).where(*same_key).values(**values)
    for source_key in connection.execute(sa.select(*source).select_from(unused).distinct()).all():
        same_source = [column == value for column, value in zip(source, source_key, strict=True)]
        rows = connection.execute(sa.select(*key, c("body")).select_from(unused).where(*same_source)).all()
        connection.execute(fill, [_parameters(key, *row) for row in rows])


def _parameters(key: list[sa.ColumnClause[object]], *row: Any) -> dict[str, object]:
    """The statement's parameters for a row: its key, and the values from its body."""
    *key_values, body = row
    record = json.loads(body)
    values = {"new_module": record["module"], "new_names": len(record["locally"])}
    return {f"key_{column.name}": value for column, value in zip(key, key_values, strict=True)} | values


def _rebuild(*, with_rowid: bool) -> None:
    if op.get_bind().dialect.name != "sqlite":
        return
    for name in TABLES:
        with op.batch_alter_table(name, recreate="always", table_kwargs={"sqlite_with_rowid": with_rowid}):
            pass
