"""Add the totals of each attempt by host, from which fleets are reported."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_NUMBERS = ("made_ns", "commits", "began_ns", "wall_ns", "ranks", "has_rank_zero")


def upgrade() -> None:
    op.create_table(
        "host_totals",
        sa.Column("run_id", sa.String(128), primary_key=True),
        sa.Column("attempt", sa.String(128), primary_key=True),
        sa.Column("host", sa.String(256), primary_key=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _NUMBERS),
        sa.Column("torch", sa.String(64), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("parts", sa.Text(), nullable=False),
        sa.Column("excess_ratio", sa.Double()),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("host_totals")
