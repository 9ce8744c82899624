"""Add how each source ended and how long it has been stuck, and a table of fingerprints."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("sources") as sources:
        sources.add_column(sa.Column("ended", sa.String(length=16), nullable=False, server_default=""))
        sources.add_column(sa.Column("stuck_ns", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE sources SET ended = 'finished' WHERE goodbye")
    op.execute(
        "UPDATE sources SET ended = 'failed' WHERE EXISTS (SELECT 1 FROM events AS e "
        "WHERE e.run_id = sources.run_id AND e.source = sources.source AND e.kind = 'failed')"
    )
    with op.batch_alter_table("sources") as sources:
        sources.alter_column("ended", server_default=None)
        sources.alter_column("stuck_ns", server_default=None)
    op.create_table(
        "fingerprints",
        sa.Column("run_id", sa.String(length=128), autoincrement=False, nullable=False),
        sa.Column("source", sa.String(length=128), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("module", sa.Integer(), nullable=False),
        sa.Column("synchronised", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=16), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "source", "seq", "position"),
    )


def downgrade() -> None:
    op.drop_table("fingerprints")
    with op.batch_alter_table("sources") as sources:
        sources.drop_column("stuck_ns")
        sources.drop_column("ended")
