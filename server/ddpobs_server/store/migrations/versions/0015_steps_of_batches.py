"""Add the first and last step and collective of each batch, and an index of the ranks' sources."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_COLUMNS = ("first_step", "last_step", "first_collective", "last_collective")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("batches", sa.Column(name, sa.BigInteger()))
    op.create_index("ix_sources_rank", "sources", ["run_id", "attempt", "rank"])


def downgrade() -> None:
    op.drop_index("ix_sources_rank", "sources")
    for name in _COLUMNS:
        op.drop_column("batches", name)
