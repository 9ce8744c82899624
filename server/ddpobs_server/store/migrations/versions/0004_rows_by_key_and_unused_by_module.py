"""Unused sets know their module and how many names they have; in SQLite, narrow rows are kept by their key alone."""

import json

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
    """By Python's own JSON: PostgreSQL reads no text in which a name has a NUL."""
    c = sa.column
    key: list[sa.ColumnClause[object]] = [c(name) for name in ("run_id", "source", "seq", "position")]
    unused = sa.table("unused", *key, c("body"), c("module"), c("names"))
    told = connection.execute(sa.select(*key, c("body")).select_from(unused)).all()
    rows = []
    for *at, body in told:
        record = json.loads(body)
        values = {"of_module": record["module"], "of_names": len(record["locally"])}
        rows.append({f"at_{column.name}": value for column, value in zip(key, at, strict=True)} | values)
    if rows:
        here = [column == sa.bindparam(f"at_{column.name}") for column in key]
        found = sa.update(unused).where(*here)
        connection.execute(found.values(module=sa.bindparam("of_module"), names=sa.bindparam("of_names")), rows)


def _rebuild(*, with_rowid: bool) -> None:
    if op.get_bind().dialect.name != "sqlite":
        return
    for name in TABLES:
        with op.batch_alter_table(name, recreate="always", table_kwargs={"sqlite_with_rowid": with_rowid}):
            pass
