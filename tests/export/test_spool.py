from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from ddpobs.export.spool import Encoded, Spool

SOURCE = "b" * 16


def put(spool: Spool, seq: int, size: int = 10, run: str = "r") -> list[tuple[str, int]]:
    """Run and records of each batch that was dropped for it."""
    dropped: list[tuple[str, int]] = []
    spool.put(Encoded(run, SOURCE, seq, 5, b"x" * size), seq, lambda run, records: dropped.append((run, records)))
    return dropped


def test_a_full_spool_drops_its_oldest_and_counts_their_records(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 25)
    assert [put(spool, seq) for seq in range(3)] == [[], [], [("r", 5)]]
    assert [kept.seq for kept in spool.batches()] == [1, 2]


def test_a_foreign_file_is_passed_over(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 100)
    (tmp_path / "rubbish.batch").write_bytes(b"?")
    put(spool, 0)
    assert [(kept.run, kept.source, kept.body()) for kept in spool.batches()] == [("r", SOURCE, b"x" * 10)]


def test_batches_of_other_processes_count_before_long(tmp_path: Path) -> None:
    spool, other = Spool(tmp_path, 1000), Spool(tmp_path, 1000)
    put(spool, 0)
    for seq in range(1, 100):
        put(other, seq)
    for seq in range(100, 180):
        put(spool, seq)
    assert sum(kept.path.stat().st_size for kept in spool.batches()) <= 1000


def test_a_batch_larger_than_the_spool_drives_nothing_out(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 25)
    assert [put(spool, 0), put(spool, 1, size=26)] == [[], [("r", 5)]]
    assert [kept.seq for kept in spool.batches()] == [0]


def test_what_another_run_loses_is_told_with_its_name_even_if_the_disk_then_fails(
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


def test_a_file_that_may_not_be_removed_stays_and_another_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [kept.seq for kept in spool.batches()] == [0, 2]


def test_a_folder_that_another_user_made_first_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, 100, private=True)
    put(spool, 0)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match="DDPOBS_SPOOL"):
        put(spool, 1)
    assert [kept.seq for kept in spool.batches()] == [0]
    put(Spool(tmp_path, 100), 2)  # One that was named may be somebody else's.
    assert [kept.seq for kept in spool.batches()] == [0, 2]
