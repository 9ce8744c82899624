"""What the `ddpobs` command sends, and what it prints where a collector refuses or does not answer."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.support.cli import ddpobs
from tests.support.integration.collectors import absent, collector, rubbish


def test_an_impossible_run_id_is_refused_without_a_request(tmp_path: Path) -> None:
    for command in (["report", "a/b"], ["trace", "..", "--steps", "1:2", "-o", str(tmp_path / "t")]):
        completed = ddpobs(*command, "--collector", absent())
        assert completed.returncode == 2
        assert completed.stderr.startswith("ddpobs: run: expected 1 to 128 of A-Z a-z 0-9 . _ -")


def test_a_refusal_is_printed_with_the_collectors_reason_and_the_remedy() -> None:
    problem = json.dumps({"title": "Token needed", "detail": "send one"}).encode()
    with collector(lambda path: (401, {}, problem)) as server:
        refused = ddpobs("report", "r", "--collector", server.url)
    with collector(lambda path: (502, {}, b"<h1>Bad gateway</h1>")) as server:
        broken = ddpobs("report", "r", "--collector", server.url)
    unreachable = ddpobs("report", "r", "--collector", absent())
    assert refused.stderr.endswith("HTTP 401: Token needed: send one: set DDPOBS_TOKEN\n")
    assert broken.stderr.endswith("HTTP 502: <h1>Bad gateway</h1>\n")
    assert "--collector or DDPOBS_TELEMETRY" in unreachable.stderr
    assert (refused.returncode, broken.returncode, unreachable.returncode) == (1, 1, 1)


def test_the_token_and_the_collectors_host_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPOBS_TOKEN", "secret")
    with collector(lambda path: (200, {}, b'{"runs": []}')) as server:
        ddpobs("report", "--collector", f"{server.url}/")
    (headers,) = server.headers
    assert (headers["Host"], headers["Authorization"]) == (server.url.removeprefix("http://"), "Bearer secret")


def test_a_redirect_is_reported_and_not_followed() -> None:
    with collector(lambda path: (302, {"Location": absent()}, b"moved")) as server:
        redirected = ddpobs("report", "r", "--collector", server.url)
    assert (redirected.returncode, redirected.stderr.endswith("HTTP 302: moved\n")) == (1, True)


def test_a_page_that_is_not_a_collectors_is_reported_with_its_start() -> None:
    with collector(rubbish) as server:
        other = ddpobs("report", "r", "--collector", server.url)
    assert other.returncode == 1
    assert other.stderr.endswith("/runs/r/diagnostics: not a collector's reply: <html>welcome</html>\n")


def test_a_collector_that_does_not_answer_is_given_up_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPOBS_TIMEOUT_S", "0.2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = ddpobs("report", "r", "--collector", f"http://127.0.0.1:{server.getsockname()[1]}")
    assert silent.returncode == 1
    assert "timed out: is this the collector?" in silent.stderr


def test_a_certificate_counts_if_ssl_cert_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with collector(lambda path: (200, {}, b'{"runs": []}'), tls=tls) as server:
        refused = ddpobs("report", "--collector", server.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        accepted = ddpobs("report", "--collector", server.url)
    assert "certificate verify failed" in refused.stderr
    assert accepted.stderr == f"ddpobs: no run has reported to {server.url} yet\n"
