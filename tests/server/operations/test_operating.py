"""Operation: several collectors on a database, and `check`."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from ddpobs_server.operations import commands, health_monitor
from ddpobs_server.store import Store
from ddpobs_server.web.authenticator import new_token
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine, inspect
from typer.testing import CliRunner

from benchmarks.rig import databases
from benchmarks.rig.collector import collector
from tests.support.server.batches import batch, get, put, spans, steps
from tests.support.server.migration import at_revision

SERVER = str(Path(sys.executable).with_name("ddpobs-server"))


def test_two_collectors_on_one_database_store_each_batch_once(postgresql: databases.Fresh, tmp_path: Path) -> None:
    database = postgresql(tmp_path)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    batches = [batch("shared", seq=seq, rank=rank, steps=steps(seq, 1), spans=spans(seq, 1))
            for seq in range(25) for rank in range(2)]  # fmt: skip
    with collector(folders[0], database_url=database) as first, collector(folders[1], database_url=database) as second:
        with ThreadPoolExecutor(8) as pool:
            requests = [(url, b) for b in batches for url in (first.url, second.url)]
            answers = list(pool.map(lambda pair: put(*pair).status_code, requests))
        assert sorted(set(answers)) == [200, 201]
        assert answers.count(201) == len(batches)
        for url in (first.url, second.url):
            assert len(get(url, "/runs/shared/steps")["columns"]["step"]) == 50
            assert [bucket["steps"] for bucket in get(url, "/runs/shared/buckets")["buckets"]] == [50, 50]
            assert [rank["steps"] for rank in get(url, "/runs/shared/ranks")["ranks"]] == [25, 25]


def check(url: str, *arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code of `check`, and (state, detail) of each result by name."""
    done = CliRunner().invoke(commands.cli, ["check", "--json", "--database-url", url, *arguments])
    answer = json.loads(done.stdout)
    assert answer["ok"] == (done.exit_code == 0)
    assert "s3cret" not in done.output
    return done.exit_code, {result["name"]: (result["state"], result["detail"]) for result in answer["checks"]}


def test_check_of_a_healthy_collector_passes_and_changes_nothing(fresh: databases.Fresh, tmp_path: Path) -> None:
    url = fresh(tmp_path)
    assert check(url)[0] == 0
    store = Store(url)
    if "postgresql" in url:
        assert store.revisions()[0] is None, "check creates no schema"
    else:
        assert list(tmp_path.iterdir()) == []
    store.migrate()
    newest = store.revisions()[1]
    tables = inspect(create_engine(url)).get_table_names()
    store.close()
    code, results = check(url)
    expected = {"database", "schema", "writing", "clock"}
    assert set(results) == expected | (
        {"permissions", "file system", "disk", "integrity"} if "sqlite" in url else set()
    )
    assert code == 0
    assert results["schema"] == ("ok", f"at {newest}, this version's")
    assert inspect(create_engine(url)).get_table_names() == tables


@pytest.mark.parametrize(("free_gb", "state"), [(0.5, "fail"), (100, "warn"), (900, "ok")])
def test_the_disk_check_depends_on_free_bytes_and_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gb: float, state: str
) -> None:
    disk = SimpleNamespace(free=int(free_gb * 1e9), total=10**13)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    code, results = check(f"sqlite:///{tmp_path}/x.db")
    assert (code, results["disk"][0]) == (int(state == "fail"), state)


def test_an_unreadable_disk_does_not_stop_the_health_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store = Store(f"sqlite:///{tmp_path}/x.db")
    store.migrate()
    monitor = health_monitor.HealthMonitor(store, CollectorRegistry())
    monkeypatch.setattr(shutil, "disk_usage", failing)
    monitor.start()
    assert monitor.database_answers
    monitor.close()
    store.close()


def test_hanging_scrapes_leave_connections_for_other_requests(postgresql: databases.Fresh, tmp_path: Path) -> None:
    engine = create_engine(database := postgresql(tmp_path))
    with collector(tmp_path, database_url=database) as running, ThreadPoolExecutor(20) as pool:
        put(running.url, batch("slow", steps=steps(0, 2)))
        with engine.connect() as holder:
            holder.exec_driver_sql("LOCK TABLE step_histogram IN ACCESS EXCLUSIVE MODE")
            scrapes = [pool.submit(httpx.get, f"{running.url}/metrics") for _ in range(20)]
            answers = as_completed(scrapes, timeout=20)
            assert {next(answers).result().status_code for _ in range(18)} == {503}
            assert httpx.get(f"{running.url}/metrics", params={"only": "collector"}).status_code == 200
            assert get(running.url, "/runs")["runs"]
            holder.rollback()
        assert all("ddpobs_steps_total{" in scrape.result().text for scrape in answers)
    engine.dispose()


def test_check_leaves_a_restored_file_unchanged(tmp_path: Path) -> None:
    url, file = f"sqlite:///{tmp_path}/x.db", tmp_path / "x.db"
    store = Store(url)
    store.migrate()
    store.close()
    restored = sqlite3.connect(file)
    restored.execute("PRAGMA journal_mode=DELETE")
    restored.close()
    content = file.read_bytes()
    assert check(url)[0] == 0
    assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_check_exits_with_1_and_prints_text(tmp_path: Path) -> None:
    arguments = [SERVER, "check", "--database-url", f"sqlite:///{tmp_path}/none/x.db"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("fail  permissions: ")


def test_check_names_the_problem_and_no_password(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    code, results = check("postgresql+psycopg://nobody:s3cret@127.0.0.1:9/none")
    assert (code, results["database"][0]) == (1, "fail")
    in_query = check("postgresql+psycopg://127.0.0.1:9/none?user=nobody&password=s3cret&connect_timeout=1")[1]
    assert "user=nobody" in in_query["database"][1]
    at_revision(url, "0002")
    state, detail = check(url)[1]["schema"]
    assert (state, detail.partition(",")[0]) == ("fail", "at 0002; back it up")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    assert "which a newer version made" in check(url)[1]["schema"][1]
    engine.dispose()


@pytest.mark.parametrize("exposed", [{"HOST": "0.0.0.0"}, {"TRUSTED_PROXIES": "10.0.0.7"}])
def test_check_reports_public_access_without_a_token_as_serve_does(
    fresh: databases.Fresh, tmp_path: Path, exposed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((name, value),) = exposed.items()
    monkeypatch.setenv(f"DDPOBS_SERVER_{name}", value)
    url = fresh(tmp_path)
    code, results = check(url)
    assert (code, results["access"][0], "there is no token" in results["access"][1]) == (1, "fail", True)
    Store(url).migrate()
    assert check(url)[0] == 1
    with monkeypatch.context() as with_token:
        with_token.setenv("DDPOBS_SERVER_TOKEN", "s3cret")
        assert check(url)[0] == 0
    store = Store(url)
    store.add_token(new_token("x", "default", ["read"])[1])
    store.close()
    code, results = check(url)
    assert (code, results["access"]) == (0, ("ok", "other machines can connect with a token"))


def test_check_reports_an_address_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPOBS_SERVER_HOST", "203.0.113.1")
    monkeypatch.setenv("DDPOBS_SERVER_TOKEN", "s3cret")
    code, results = check(databases.sqlite(tmp_path))
    assert (code, results["address"][0]) == (1, "fail")


def test_check_reports_a_damaged_file(tmp_path: Path) -> None:
    url, file = f"sqlite:///{tmp_path}/x.db", tmp_path / "x.db"
    store = Store(url)
    store.migrate()
    store.close()
    whole = file.read_bytes()
    file.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    code, results = check(url)
    assert (code, results["integrity"][0]) == (1, "fail")
    assert "integrity" not in check(url, "--no-integrity")[1]


@pytest.mark.parametrize("setting", [{"keep_gb": "inf"}, {"max_body_mb": "nan"}, {"keep_spans_days": "150000"}])
def test_a_setting_out_of_range_is_refused(setting: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, value),) = setting.items()
    monkeypatch.setenv(f"DDPOBS_SERVER_{name.upper()}", value)
    done = CliRunner().invoke(commands.cli, ["check"])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"ddpobs-server: {name}: ")
