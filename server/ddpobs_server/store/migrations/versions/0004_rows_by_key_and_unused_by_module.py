"""Unused sets know their module and how many names they have; in SQLite, narrow rows are kept by their key alone."""

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
    """By Python's own JSON: PostgreSQL reads no text in which a name has a NUL.

    Source by source: one whose set changes in every step has some hundred thousand.
    """
    c = sa.column
    source: list[sa.ColumnClause[object]] = [c("run_id"), c("source")]
    key = [*source, c("seq"), c("position")]
    unused = sa.table("unused", *key, c("body"), c("module"), c("names"))
    here = [column == sa.bindparam(f"at_{column.name}") for column in key]
    found = sa.update(unused).where(*here).values(module=sa.bindparam("of_module"), names=sa.bindparam("of_names"))
    for of in connection.execute(sa.select(*source).select_from(unused).distinct()).all():
        of_source = [column == value for column, value in zip(source, of, strict=True)]
        told = connection.execute(sa.select(*key, c("body")).select_from(unused).where(*of_source)).all()
        connection.execute(found, [_row(key, *row) for row in told])


def _row(key: list[sa.ColumnClause[object]], *row: Any) -> dict[str, object]:
    """What the statement takes of a row: its key, and what its body says."""
    *at, body = row
    record = json.loads(body)
    values = {"of_module": record["module"], "of_names": len(record["locally"])}
    return {f"at_{column.name}": value for column, value in zip(key, at, strict=True)} | values


def _rebuild(*, with_rowid: bool) -> None:
    if op.get_bind().dialect.name != "sqlite":
        return
    for name in TABLES:
        with op.batch_alter_table(name, recreate="always", table_kwargs={"sqlite_with_rowid": with_rowid}):
            pass
