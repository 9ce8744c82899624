"""Store limits of workspaces, and index unused sets without their names."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0005"
branch_labels = None
depends_on = None

SETS = ["run_id", "source", "module", "seq", "position", "names"]


def upgrade() -> None:
    workspace = sa.Column("workspace", sa.String(32), primary_key=True)
    op.create_table("workspaces", workspace, sa.Column("limits", sa.Text(), nullable=False))
    op.create_index("ix_unused_sets", "unused", SETS)


def downgrade() -> None:
    op.drop_index("ix_unused_sets", "unused")
    op.drop_table("workspaces")
