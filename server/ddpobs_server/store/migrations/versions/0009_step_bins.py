"""Add a table of bins of steps, by which a whole run is shown and judged."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "step_bins",
        sa.Column("run_id", sa.String(length=128), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.String(length=128), autoincrement=False, nullable=False),
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("bin", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("block", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("stale", sa.BigInteger(), nullable=False),
        sa.Column("columns", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "level", "bin", "block"),
    )


def downgrade() -> None:
    op.drop_table("step_bins")
