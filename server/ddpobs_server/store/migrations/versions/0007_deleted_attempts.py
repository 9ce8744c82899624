"""Add a table of the attempts of deleted runs."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deleted_attempts",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.String(length=128), nullable=False),
        sa.Column("deleted_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt"),
    )


def downgrade() -> None:
    op.drop_table("deleted_attempts")
