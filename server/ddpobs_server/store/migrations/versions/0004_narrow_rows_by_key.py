"""In SQLite, tables of narrow rows are kept by their key alone: with a rowid each key would be stored twice."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = ("batches", "rollups", "bucket_rollups", "step_histogram", "peer_totals")


def upgrade() -> None:
    _rebuild(with_rowid=False)


def downgrade() -> None:
    _rebuild(with_rowid=True)


def _rebuild(*, with_rowid: bool) -> None:
    if op.get_bind().dialect.name != "sqlite":
        return
    for name in TABLES:
        with op.batch_alter_table(name, recreate="always", table_kwargs={"sqlite_with_rowid": with_rowid}):
            pass
