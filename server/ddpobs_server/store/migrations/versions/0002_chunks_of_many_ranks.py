"""Give chunks an attempt, a rank and an index by step, so that reads find them without unpacking payloads.

A chunk may hold rows of several ranks.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("chunks") as chunks:
        chunks.add_column(sa.Column("attempt", sa.String(length=16), nullable=False, server_default=""))
        chunks.add_column(sa.Column("rank", sa.BigInteger(), nullable=False, server_default="0"))
    for name in ("attempt", "rank"):
        op.execute(
            f"UPDATE chunks SET {name} = (SELECT s.{name} FROM sources AS s "
            "WHERE s.run_id = chunks.run_id AND s.source = chunks.source)"
        )
    op.execute("UPDATE chunks SET kind = kind || '-1' WHERE kind IN ('steps', 'spans', 'comms')")
    op.execute(
        "DELETE FROM chunks WHERE kind LIKE 'peers-%'"
    )  # Their sums are in peer_totals; the chunks are never read.
    with op.batch_alter_table("chunks") as chunks:
        chunks.alter_column("attempt", server_default=None)
        chunks.alter_column("rank", server_default=None)
        chunks.create_index("ix_chunks_steps", ["run_id", "attempt", "kind", "last_step", "first_step"])


def downgrade() -> None:
    with op.batch_alter_table("chunks") as chunks:
        chunks.drop_index("ix_chunks_steps")
        chunks.drop_column("rank")
        chunks.drop_column("attempt")
