"""SIGHUP: a real collector follows its certificate, tokens and limits; a fault leaves all as it was."""

from __future__ import annotations

import signal
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from ddpobs_server.settings import Settings
from pydantic import ValidationError

from benchmarks.rig import patience
from benchmarks.rig.collector import Collector, collector
from ddpobs import wire
from tests.support.server import certificates
from tests.support.server.batches import batch, path, steps

OLD, NEW = "the-first-token-of-the-tests", "the-second-token-of-the-tests"


class Operator:
    """Changes the files of a collector, and asks it to read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        certificates.create(folder)
        self.trusted = ssl.create_default_context(cafile=folder / "ca.pem")
        self.write(tokens=OLD, limits="DDPOBS_SERVER_MAX_RECORDS=100\n")

    def write(self, tokens: str | None = None, limits: str | None = None) -> None:
        if tokens is not None:
            (self.folder / "tokens").write_text(tokens)
        if limits is not None:
            (self.folder / "settings").write_text(limits)

    def certificate(self, running: Collector) -> str:
        address = urlsplit(running.url)
        return ssl.get_server_certificate((str(address.hostname), int(address.port or 0)))

    def status(self, running: Collector, token: str, rows: int = 2) -> int:
        """Status of a batch with so many steps, over a new connection."""
        sent = batch(f"run-of-{rows}", steps=steps(0, rows))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": wire.MSGPACK}
        url = running.url + path(sent)
        return httpx.put(url, content=wire.encode(sent), headers=headers, verify=self.trusted).status_code

    def reload(self, running: Collector, outcome: str) -> None:
        before = running.log.read_text().count(outcome)
        running.process.send_signal(signal.SIGHUP)
        patience.until(lambda: running.log.read_text().count(outcome) > before, running.log.read_text)


def test_certificate_tokens_and_limits_change_without_a_restart(tmp_path: Path) -> None:
    operator = Operator(tmp_path)
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "token_file": "tokens", "settings_file": "settings"}
    settings: dict[str, Any] = {name: tmp_path / file for name, file in files.items()}
    with collector(tmp_path, ca=tmp_path / "ca.pem", **settings) as running:
        first = operator.certificate(running)
        assert operator.status(running, OLD, 50) == 201
        certificates.sign(tmp_path, tmp_path / "server.pem", 9)
        operator.write(NEW, "DDPOBS_SERVER_MAX_RECORDS=10\nDDPOBS_SERVER_QUEUE_BATCHES=7\n")
        operator.reload(running, "were read again; changed: max_records=10")
        assert "need a restart: queue_batches" in running.log.read_text()
        second = operator.certificate(running)
        assert second != first
        assert (operator.status(running, OLD), operator.status(running, NEW)) == (401, 201)
        assert operator.status(running, NEW, 40) == 413

        good = {file: (tmp_path / file).read_bytes() for file in files.values()}
        for file, content, reason in (
            ("settings", b"DDPOBS_SERVER_MAX_RECORDS=none\n", "max_records: "),
            ("settings", b"DDPOBS_SERVER_MAX_RECORD=1\n", "ddpobs_server_max_record: "),
            ("tokens", b"", "tokens has no token"),
            ("server.pem", b"hello", "expected a certificate chain"),
            ("server.key", (tmp_path / "ca.key").read_bytes(), "expected a certificate chain"),
        ):
            (tmp_path / file).write_bytes(content)
            operator.reload(running, "the reload is refused")
            assert reason in running.log.read_text().splitlines()[-1]
            assert operator.certificate(running) == second
            assert (operator.status(running, NEW), operator.status(running, NEW, 40)) == (200, 413)
            (tmp_path / file).write_bytes(good[file])
        headers = {"Authorization": f"Bearer {NEW}"}
        metrics = httpx.get(f"{running.url}/metrics", headers=headers, verify=operator.trusted).text
        assert "ddpobs_server_last_reload_successful 0.0" in metrics
        operator.reload(running, "changed: no setting")
        audit = httpx.get(f"{running.url}/api/v1/audit", headers=headers, verify=operator.trusted).json()["entries"]
    assert [entry["action"] for entry in audit] == ["settings.reload"] * 2
    assert audit[1]["detail"] == {"changed": ["max_records=10"], "need_restart": ["queue_batches"]}


def test_the_environment_comes_before_the_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings"
    file.write_text("DDPOBS_SERVER_MAX_RUNS=5\nDDPOBS_SERVER_MAX_RANKS=6\n")
    monkeypatch.setenv("DDPOBS_SERVER_SETTINGS_FILE", str(file))
    monkeypatch.setenv("DDPOBS_SERVER_MAX_RUNS", "7")
    settings = Settings()
    assert (settings.max_runs, settings.max_ranks) == (7, 6)
    file.unlink()
    with pytest.raises(ValidationError, match="is no file that can be read"):
        Settings()
