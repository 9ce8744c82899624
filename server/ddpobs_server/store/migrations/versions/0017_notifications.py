"""Add the findings that a webhook was sent."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "notifications",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("attempt", sa.String(128), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("severity", sa.String(16), nullable=False),
        sa.Column("claimed_ns", sa.BigInteger(), nullable=False),
        sa.Column("sent_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "code", "severity"),
    )


def downgrade() -> None:
    op.drop_table("notifications")
