"""Store limits of workspaces, count the bytes of records, and index unused sets without their names."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

SETS = ["run_id", "source", "module", "seq", "position", "names"]


def upgrade() -> None:
    workspace = sa.Column("workspace", sa.String(32), primary_key=True)
    op.create_table("workspaces", workspace, sa.Column("limits", sa.Text(), nullable=False))
    op.add_column("runs", sa.Column("record_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index("ix_unused_sets", "unused", SETS)


def downgrade() -> None:
    op.drop_index("ix_unused_sets", "unused")
    op.drop_column("runs", "record_bytes")
    op.drop_table("workspaces")
