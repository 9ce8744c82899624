"""Add the time at which each source ended, and the end `interrupted`."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("sources") as sources:
        sources.add_column(sa.Column("ended_ns", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE sources SET ended_ns = wall_ns WHERE ended <> ''")
    op.execute(
        "UPDATE sources SET ended = 'interrupted' WHERE ended = 'failed' AND EXISTS (SELECT 1 FROM events AS e "
        "WHERE e.run_id = sources.run_id AND e.source = sources.source AND e.kind = 'failed' "
        'AND e.body LIKE \'%"error":"KeyboardInterrupt"%\')'
    )
    with op.batch_alter_table("sources") as sources:
        sources.alter_column("ended_ns", server_default=None)


def downgrade() -> None:
    op.execute("UPDATE sources SET ended = 'failed' WHERE ended = 'interrupted'")
    with op.batch_alter_table("sources") as sources:
        sources.drop_column("ended_ns")
