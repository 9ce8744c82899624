"""Add the account of each source's wall time."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("sources") as sources:
        sources.add_column(sa.Column("account", sa.Text(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("sources") as sources:
        sources.drop_column("account")
