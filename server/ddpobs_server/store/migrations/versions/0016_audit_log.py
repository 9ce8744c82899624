"""Add the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column("entry_id", sa.String(24), primary_key=True),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.Column("workspace", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("identity", sa.String(128), nullable=False),
        sa.Column("token_id", sa.String(16), nullable=False),
        sa.Column("peer", sa.String(255), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(128), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
    )
    op.create_index("ix_audit_log_workspace", "audit_log", ["workspace", "entry_id"])


def downgrade() -> None:
    op.drop_table("audit_log")
