"""A streaming replica of PostgreSQL takes over while a collector stores batches."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rig import databases, patience
from ddpobs.export import http_sender
from tests.support.integration.faults import Ranks, RestartableCollector, assert_stored_once, push

pytestmark = pytest.mark.wide


def test_a_promoted_replica_has_every_acknowledged_batch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_sender, "_LONGEST_PAUSE_S", 0.3)
    with databases.postgresql_server() as primary:
        url = databases.new_database(primary)
        with replica_of(primary) as replica:
            hosts = f"host={primary.pgdata},{replica}&target_session_attrs=read-write"
            database = url.replace(f"host={primary.pgdata}", hosts)
            with RestartableCollector(tmp_path / "collector", database_url=database) as collector:
                with Ranks(collector.url, "promoted", tmp_path / "spool") as ranks:
                    collector.wait_for_batches(20)
                    databases.stop(primary, "immediate")
                    pg_ctl(primary, replica, "promote")
                    collector.wait_for_batches(20)
                push(ranks.spool, collector.url)
                assert_stored_once(collector.url, "promoted", ranks.steps)


@contextmanager
def replica_of(primary: Any) -> Iterator[Path]:
    """The data of a running replica, which has each commit before the primary acknowledges it."""
    data = primary.pgdata.with_name("replica")
    data.mkdir(mode=0o700)
    if primary.system_user is not None:
        shutil.chown(data, primary.system_user)
    copy = ["-h", primary.pgdata, "-U", "postgres", "-D", data, "--write-recovery-conf", "--checkpoint=fast"]
    run(primary, "pg_basebackup", *copy)
    (data / ".s.PGSQL.5432.lock").unlink()  # Of the primary's socket.
    pg_ctl(primary, data, "start", "-l", data / "log", "-o", f"-h '' -k {data}")
    try:
        for setting in ("ALTER SYSTEM SET synchronous_standby_names = '*';", "SELECT pg_reload_conf();"):
            primary.psql(setting)
        patience.until(lambda: "sync" in primary.psql("SELECT sync_state FROM pg_stat_replication;"))
        yield data
    finally:
        pg_ctl(primary, data, "stop", "-m", "immediate")


def pg_ctl(server: Any, data: Path, command: str, *arguments: str | Path) -> None:
    run(server, "pg_ctl", "-w", "-D", data, command, *arguments)


def run(server: Any, program: str, *arguments: str | Path) -> None:
    command = [server.bin_path / program, *arguments]
    subprocess.run(command, user=server.system_user, check=True, stdout=subprocess.DEVNULL, timeout=patience.HANG_S)
