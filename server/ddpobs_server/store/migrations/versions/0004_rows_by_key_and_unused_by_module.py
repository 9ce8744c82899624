"""Unused sets know their module and how many names they have; in SQLite, narrow rows are kept by their key alone."""

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
    if op.get_bind().dialect.name == "sqlite":
        module, names = "json_extract(body, '$.module')", "json_array_length(body, '$.locally')"
    else:
        module, names = (
            "CAST(CAST(body AS json)->>'module' AS integer)",
            "json_array_length(CAST(body AS json)->'locally')",
        )
    op.execute(f"UPDATE unused SET module = {module}, names = {names}")
    with op.batch_alter_table("unused") as unused:
        unused.alter_column("module", server_default=None)
        unused.alter_column("names", server_default=None)
    _rebuild(with_rowid=False)


def downgrade() -> None:
    _rebuild(with_rowid=True)
    with op.batch_alter_table("unused") as unused:
        unused.drop_column("names")
        unused.drop_column("module")


def _rebuild(*, with_rowid: bool) -> None:
    if op.get_bind().dialect.name != "sqlite":
        return
    for name in TABLES:
        with op.batch_alter_table(name, recreate="always", table_kwargs={"sqlite_with_rowid": with_rowid}):
            pass
