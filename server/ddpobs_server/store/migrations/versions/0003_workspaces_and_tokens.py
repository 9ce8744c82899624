"""Add the workspace and the size of chunks to runs, and a table of tokens."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("workspace", sa.String(length=32), nullable=False, server_default="default"))
        runs.add_column(sa.Column("chunk_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE runs SET chunk_bytes = "
        "(SELECT coalesce(sum(length(c.payload)), 0) FROM chunks AS c WHERE c.run_id = runs.run_id)"
    )
    with op.batch_alter_table("runs") as runs:
        runs.alter_column("workspace", server_default=None)
        runs.alter_column("chunk_bytes", server_default=None)
        runs.create_index("ix_runs_workspace", ["workspace", "last_seen_ns"])
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("workspace", sa.String(length=32), nullable=False),
        sa.Column("scopes", sa.String(length=64), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("revoked_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("token_id"),
    )


def downgrade() -> None:
    op.drop_table("tokens")
    with op.batch_alter_table("runs") as runs:
        runs.drop_index("ix_runs_workspace")
        runs.drop_column("chunk_bytes")
        runs.drop_column("workspace")
