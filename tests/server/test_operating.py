"""What an operator does: several collectors on one database, looking whether all is well, measuring."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ddpobs_server import bench
from ddpobs_server.store import Store, schema

from tests import databases
from tests.collector import collector
from tests.server.batches import batch, get, put, spans, steps

SERVER = str(Path(sys.executable).with_name("ddpobs-server"))


def test_two_collectors_on_one_database_store_each_batch_once(postgresql: databases.Fresh, tmp_path: Path) -> None:
    database = postgresql(tmp_path)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    sent = [batch("shared", seq=seq, rank=rank, steps=steps(seq, 1), spans=spans(seq, 1))
            for seq in range(25) for rank in range(2)]  # fmt: skip
    with collector(folders[0], database_url=database) as one, collector(folders[1], database_url=database) as other:
        with ThreadPoolExecutor(8) as pool:
            both = [(url, b) for b in sent for url in (one.url, other.url)]
            answers = list(pool.map(lambda pair: put(*pair).status_code, both))
        assert sorted(set(answers)) == [200, 201]
        assert answers.count(201) == len(sent)
        for url in (one.url, other.url):
            assert len(get(url, "/runs/shared/steps")["columns"]["step"]) == 50
            assert [bucket["steps"] for bucket in get(url, "/runs/shared/buckets")["buckets"]] == [50, 50]
            assert [rank["steps"] for rank in get(url, "/runs/shared/ranks")["ranks"]] == [25, 25]


def test_check_says_that_all_is_well(fresh: databases.Fresh, tmp_path: Path) -> None:
    done = subprocess.run(
        [SERVER, "check", "--database-url", fresh(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split(":")[0].split()[1] for line in done.stdout.splitlines()} >= {"database", "schema", "clock"}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:////nowhere/at/all.db", "does not answer"),
        ("postgresql+psycopg://nobody:s3cret@127.0.0.1:9/none", "does not answer"),
    ],
)
def test_check_says_what_is_wrong_and_no_password(url: str, says: str) -> None:
    done = subprocess.run([SERVER, "check", "--database-url", url], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert says in done.stdout
    assert "s3cret" not in done.stdout + done.stderr


def test_the_statements_that_distribute_name_every_table(tmp_path: Path) -> None:
    store = Store(databases.sqlite(tmp_path))
    statements = store.distribution()
    assert {statement.split("'")[1] for statement in statements} == set(schema.metadata.tables)
    assert all("'run_id'" in statement for statement in statements if "tokens" not in statement)
    with pytest.raises(ValueError, match="expected a PostgreSQL"):
        store.distribute()
    store.close()


@pytest.mark.parametrize("load", [bench.flood(clients=2, batches=2), bench.job(ranks=8, seconds=4, clients=2)])
def test_bench_loses_nothing(load: bench.Load) -> None:
    found = bench.measure(load)
    assert found["lost"] == 0
    assert found["bytes_per_span"] > 0
    assert found["cpu_ns_per_span"] >= 0
