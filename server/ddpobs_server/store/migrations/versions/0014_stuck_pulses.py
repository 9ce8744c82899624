"""Add the last pulse of each source in which it was stuck. A later pulse does not replace it."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("sources") as sources:
        sources.add_column(sa.Column("stuck_pulse", sa.Text(), nullable=True))
    op.execute("UPDATE sources SET stuck_pulse = pulse WHERE stuck_ns > 0")


def downgrade() -> None:
    with op.batch_alter_table("sources") as sources:
        sources.drop_column("stuck_pulse")
