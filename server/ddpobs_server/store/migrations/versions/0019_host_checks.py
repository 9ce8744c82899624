"""Add the rates of hosts in earlier checks."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "host_checks",
        sa.Column("workspace", sa.String(32), primary_key=True),
        sa.Column("host", sa.String(256), primary_key=True),
        sa.Column("device", sa.String(16), primary_key=True),
        sa.Column("ranks", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("made_ns", sa.BigInteger(), nullable=False),
        sa.Column("rates", sa.Text(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("host_checks")
