"""Add the text by which each run is found: its name, host, tags and note in lower case, a line each."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_RUNS = sa.text("SELECT run_id, attempt, tags, note FROM runs")
_HELLO = sa.text("SELECT hello FROM sources WHERE run_id = :run AND attempt = :attempt ORDER BY rank LIMIT 1")
_SET = sa.text("UPDATE runs SET search_text = :text WHERE run_id = :run")


def upgrade() -> None:
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("search_text", sa.Text(), nullable=False, server_default=""))
    connection = op.get_bind()
    for run, attempt, tags, note in connection.execute(_RUNS).all():
        hello = json.loads(connection.execute(_HELLO, {"run": run, "attempt": attempt}).scalar() or "{}")
        settings = hello.get("settings", {})
        trained = {name: value if isinstance(value := settings.get(name), str) else "" for name in ("tags", "note")}
        known = json.loads(tags) if tags is not None else [tag for tag in trained["tags"].split(",") if tag]
        texts = (run.rpartition("/")[2], hello.get("host", ""), *(f"#{tag}" for tag in known))
        text = "\n".join((*texts, trained["note"] if note is None else note)).lower().replace("\0", "\ufffd")[:5000]
        connection.execute(_SET, {"run": run, "text": text})


def downgrade() -> None:
    with op.batch_alter_table("runs") as runs:
        runs.drop_column("search_text")
