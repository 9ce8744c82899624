"""Add the exposed communication without waiting to the straggler statistics."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("peer_totals") as totals:
        totals.add_column(sa.Column("moving_ns", sa.BigInteger(), nullable=False, server_default="0"))
    with op.batch_alter_table("peer_totals") as totals:
        totals.alter_column("moving_ns", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("peer_totals") as totals:
        totals.drop_column("moving_ns")
