"""HTTPS of the collector, and addresses forwarded by a proxy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from ddpobs_server.operations import self_check
from ddpobs_server.settings import Settings

from benchmarks.rig.collector import collector
from tests.support.server import certificates as certificates_of
from tests.support.server.batches import assert_problem

SENDING = """
import sys, zstandard
from ddpobs import TelemetryConfig, wire
from ddpobs.export.http_sender import Sender
from tests.support.server.batches import batch, steps
sent = batch("over-tls", steps=steps(0, 2))
answer = Sender(TelemetryConfig(collector=sys.argv[1])).send(
    sent.run, sent.source, sent.seq, zstandard.compress(wire.encode(sent)))
print(answer.outcome.value, answer.detail)
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ca.pem`, a private authority, and the signed `server.pem` with `server.key`."""
    folder = tmp_path_factory.mktemp("certificates")
    certificates_of.create(folder)
    return folder


def test_ranks_and_the_command_trust_the_authority_in_ssl_cert_file(certificates: Path, tmp_path: Path) -> None:
    served: dict[str, Any] = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}
    with collector(tmp_path, ca=certificates / "ca.pem", **served) as running:
        assert running.url.startswith("https://")

        def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, *arguments], env=os.environ | environ, capture_output=True, text=True, check=False
            )

        refused = python("-c", SENDING, running.url)
        assert refused.stdout.startswith("retry"), refused.stderr
        assert "CERTIFICATE_VERIFY_FAILED" in refused.stdout
        trusting = {"SSL_CERT_FILE": str(certificates / "ca.pem")}
        assert python("-c", SENDING, running.url, **trusting).stdout.startswith("stored")
        report = python("-m", "ddpobs.cli", "report", "over-tls", "--collector", running.url, **trusting)
        assert report.returncode == 0, report.stderr
        with pytest.raises(httpx.TransportError):
            httpx.get(running.url.replace("https:", "http:"))


@pytest.mark.parametrize("trusted", [True, False])
def test_forwarded_addresses_are_used_only_from_trusted_proxies(tmp_path: Path, trusted: bool) -> None:
    settings: dict[str, Any] = {"trusted_proxies": "127.0.0.1"} if trusted else {}
    with collector(tmp_path, token="s3cret", **settings) as running, httpx.Client(base_url=running.url) as browser:

        def read_runs(token: str, client: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}", "X-Forwarded-For": f"6.6.6.6, {client}"}
            return browser.get("/api/v1/runs", headers=headers)

        for number in range(20):
            assert_problem(read_runs(f"guess-{number}", "10.0.0.1"), 401)
        refused = assert_problem(read_runs("s3cret", "10.0.0.1"), 429)
        assert ("10.0.0.1" if trusted else "127.0.0.1") in refused["detail"]
        assert read_runs("s3cret", "10.0.0.2").status_code == (200 if trusted else 429)


def test_behind_a_trusted_proxy_loopback_needs_a_token(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("ddpobs-server")), "--trusted-proxies", "127.0.0.1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no token" in done.stderr


def test_an_unusable_certificate_is_reported_with_its_file(certificates: Path) -> None:
    for settings, fits in (
        (Settings(tls_cert=certificates / "server.pem", tls_key=certificates / "server.key"), True),
        (Settings(tls_cert=certificates / "server.pem", tls_key=certificates / "ca.key"), False),
        (Settings(tls_cert=certificates / "nowhere.pem"), False),
    ):
        problem = self_check.tls_problem(settings)
        assert (problem is None) == fits
        assert fits or str(settings.tls_cert) in str(problem)


@pytest.mark.parametrize(
    ("days", "state", "detail"), [(400, "ok", "400 more days"), (3, "warn", "3 more days"), (-1, "fail", "has expired")]
)
def test_the_check_reports_the_remaining_days_of_a_certificate(
    certificates: Path, tmp_path: Path, days: int, state: str, detail: str
) -> None:
    certificates_of.sign(certificates, tmp_path / "some.pem", days)
    settings = Settings(
        tls_cert=tmp_path / "some.pem", tls_key=certificates / "server.key", database_url=f"sqlite:///{tmp_path}/new.db"
    )
    result = {result.name: result for result in self_check.run(settings)}["tls"]
    assert result.state == state
    assert detail in result.detail
