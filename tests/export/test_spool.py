"""The spool's folder: order, limit and foreign files."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from ddpobs.export.spool import Encoded, Spool

SOURCE = "b" * 16


def put(spool: Spool, seq: int, size: int = 10, run: str = "r") -> list[tuple[str, int]]:
    """Put a batch; returns run and number of records of each dropped batch."""
    dropped: list[tuple[str, int]] = []
    spool.put(Encoded(run, SOURCE, seq, 5, b"x" * size), seq, lambda run, records: dropped.append((run, records)))
    return dropped


def test_a_full_spool_drops_its_oldest_and_counts_their_records(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 25)
    assert [put(spool, seq) for seq in range(3)] == [[], [], [("r", 5)]]
    assert [batch.seq for batch in spool.batches()] == [1, 2]


def test_a_foreign_file_is_skipped(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 100)
    (tmp_path / "rubbish.batch").write_bytes(b"?")
    put(spool, 0)
    assert [(batch.run, batch.source, batch.body()) for batch in spool.batches()] == [("r", SOURCE, b"x" * 10)]


def test_batches_of_other_processes_are_counted_soon(tmp_path: Path) -> None:
    spool, other = Spool(tmp_path, 1000), Spool(tmp_path, 1000)
    put(spool, 0)
    for seq in range(1, 100):
        put(other, seq)
    for seq in range(100, 180):
        put(spool, seq)
    assert sum(batch.path.stat().st_size for batch in spool.batches()) <= 1000


def test_a_batch_larger_than_the_spool_displaces_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 25)
    assert [put(spool, 0), put(spool, 1, size=26)] == [[], [("r", 5)]]
    assert [batch.seq for batch in spool.batches()] == [0]


def test_losses_of_another_run_are_reported_with_its_id_even_if_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, 25)
    put(spool, 0, run="earlier")
    put(spool, 1)
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(28, "no room")))
    dropped: list[tuple[str, int]] = []
    with pytest.raises(OSError, match="no room"):
        spool.put(Encoded("r", SOURCE, 2, 5, b"x" * 10), 2, lambda run, records: dropped.append((run, records)))
    assert dropped == [("earlier", 5)]


def test_a_file_that_cannot_be_removed_stays_and_another_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, 25)
    put(spool, 0, run="theirs")
    put(spool, 1)
    remove = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if "theirs" in path.name:
            raise PermissionError(path)
        remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    assert put(spool, 2) == [("r", 5)]
    assert [batch.seq for batch in spool.batches()] == [0, 2]


def test_a_folder_that_another_user_created_gets_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, 100, private=True)
    put(spool, 0)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match="DDPOBS_SPOOL"):
        put(spool, 1)
    assert [batch.seq for batch in spool.batches()] == [0]
    put(Spool(tmp_path, 100), 2)  # A folder from the settings may belong to another user.
    assert [batch.seq for batch in spool.batches()] == [0, 2]
