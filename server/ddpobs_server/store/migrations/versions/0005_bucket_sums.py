"""Pack the sums of buckets into a row per rank and layout."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

KEY = ("run_id", "source", "module", "revision")
SUMS = ("steps", "compute_ns", "comm_ns", "exposed_ns")


def upgrade() -> None:
    packed = op.create_table("bucket_sums", *_key(), sa.Column("sums", sa.LargeBinary(), nullable=False))
    _move(_rows_of("bucket_rollups", "bucket", *SUMS), packed, _packed)
    op.drop_table("bucket_rollups")


def downgrade() -> None:
    bucket = sa.Column("bucket", sa.Integer(), primary_key=True, autoincrement=False)
    sums = [sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMS]
    rollups = op.create_table("bucket_rollups", *_key(), bucket, *sums, sqlite_with_rowid=False)
    _move(_rows_of("bucket_sums", "sums"), rollups, _unpacked)
    op.drop_table("bucket_sums")


def _key() -> Iterator[sa.Column[Any]]:
    kinds: tuple[Any, ...] = (sa.String(128), sa.String(128), sa.Integer(), sa.BigInteger())
    for name, kind in zip(KEY, kinds, strict=True):
        yield sa.Column(name, kind, primary_key=True, autoincrement=False)


def _rows_of(table: str, *columns: str) -> Any:
    named: list[sa.ColumnClause[Any]] = [sa.column(name) for name in (*KEY, *columns)]
    return sa.select(*named).select_from(sa.table(table)).order_by(*named[: len(KEY) + 1])


def _move(rows: Any, target: sa.Table, convert: Any) -> None:
    """Convert rows and insert them into the target, run by run: a run has some ten thousand rows."""
    connection = op.get_bind()
    runs = connection.execute(sa.text("SELECT run_id FROM runs")).scalars().all()
    for run in runs:
        new_rows = list(convert(connection.execute(rows.where(sa.column("run_id") == run)).all()))
        if new_rows:
            connection.execute(target.insert(), new_rows)


def _packed(rows: Any) -> Iterator[dict[str, object]]:
    for key, group in groupby(rows, itemgetter(0, 1, 2, 3)):
        table = np.array([row[len(KEY) :] for row in group], "<f8").T
        yield dict(zip(KEY, key, strict=True)) | {"sums": table.tobytes()}


def _unpacked(rows: Any) -> Iterator[dict[str, object]]:
    for *key, sums in rows:
        table = np.frombuffer(bytes(sums), "<f8").reshape(1 + len(SUMS), -1).astype(np.int64)
        for column in table.T.tolist():
            yield dict(zip((*KEY, "bucket", *SUMS), (*key, *column), strict=True))
