from __future__ import annotations

from pathlib import Path

from ddpobs.spool import Spool

SOURCE = "b" * 16


def put(spool: Spool, seq: int, size: int = 10) -> int:
    return spool.put("r", SOURCE, seq, records=5, body=b"x" * size, at_ns=seq)


def test_a_full_spool_drops_its_oldest_and_counts_their_records(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 25)
    assert [put(spool, seq) for seq in range(3)] == [0, 0, 5]
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
    assert [put(spool, 0), put(spool, 1, size=26)] == [0, 5]
    assert [kept.seq for kept in spool.batches()] == [0]
