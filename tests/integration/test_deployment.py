"""Image and compose files, as far as that can be told without a Docker engine: nothing here was started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.faults import until
from tests.integration.tools import need
from tests.integration.training import ROOT
from tests.ports import free_port

COMPOSE = ("docker-compose.yml", "deploy/two-collectors.yml")


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())["services"]
    return found


@pytest.mark.parametrize("name", COMPOSE)
def test_a_compose_file_follows_the_specification(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compose = need("docker-compose", "docker-compose")
    monkeypatch.setenv("DDPOBS_SERVER_TOKEN", "a-token")
    monkeypatch.setenv("POSTGRES_PASSWORD", "word")
    done = subprocess.run([compose, "-f", name, "config"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMPOSE)
def test_every_service_is_watched_and_started_again(name: str) -> None:
    for service, found in services(name).items():
        assert found["restart"] == "unless-stopped", service
        assert "healthcheck" in found or "build" in found, f"{service}: the image of ours has its own"


@pytest.mark.parametrize("name", COMPOSE)
def test_what_a_compose_file_mounts_and_builds_is_there(name: str) -> None:
    folder = (ROOT / name).parent
    for found in services(name).values():
        for mount in found.get("volumes", []):
            if mount.startswith("."):
                assert (folder / mount.partition(":")[0]).exists(), mount
        if "build" in found:
            assert (folder / found["build"]["context"] / found["build"]["dockerfile"]).exists()


def test_the_collectors_believe_the_proxy_that_is_before_them() -> None:
    found = services("deploy/two-collectors.yml")
    address = found["proxy"]["networks"]["default"]["ipv4_address"]
    upstreams = re.findall(r"server ([\w-]+):8321", (ROOT / "deploy" / "nginx.conf").read_text())
    assert upstreams == ["collector-1", "collector-2"]
    for upstream in upstreams:
        assert found[upstream]["environment"]["DDPOBS_SERVER_TRUSTED_PROXIES"] == address


def test_the_image_runs_as_no_root_is_watched_and_copies_what_is_there() -> None:
    lines = (ROOT / "server" / "Dockerfile").read_text().splitlines()
    last = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM")) :]
    assert [line.split()[1] for line in last if line.startswith("USER")] == ["8321"]
    assert any(line.startswith("HEALTHCHECK") for line in last)
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in {name for names in copied for name in names}:
        assert Path(ROOT / source).exists(), source
        assert source in let_in


@pytest.mark.parametrize("tls", [False, True])
def test_the_image_watches_the_port_and_the_protocol_that_are_set(tmp_path: Path, tls: bool) -> None:
    settings: dict[str, Any] = {"port": free_port(), "host": "0.0.0.0", "token": "s3cret"}
    if tls:
        made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=elsewhere", "-days", "2"]
        made += ["-keyout", "one.pem", "-out", "one.pem"]
        subprocess.run([need("openssl", "openssl"), *made], cwd=tmp_path, check=True, capture_output=True)
        settings["tls_cert"] = tmp_path / "one.pem"
    log = (tmp_path / "log").open("wb")
    environ = os.environ | {f"DDPOBS_SERVER_{name.upper()}": str(value) for name, value in settings.items()}
    server = subprocess.Popen(
        [Path(sys.executable).with_name("ddpobs-server")], cwd=tmp_path, env=environ, stdout=log, stderr=log
    )
    try:
        until(lambda: is_healthy(environ))
        assert not is_healthy(environ | {"DDPOBS_SERVER_PORT": str(free_port())})
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def is_healthy(environ: dict[str, str]) -> bool:
    """What the image's health check says, in such an environment."""
    lines = (ROOT / "server" / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    (words,) = (line.partition(" CMD ")[2] for line in lines if line.startswith("HEALTHCHECK"))
    program, *arguments = json.loads(words)
    assert program == "python"
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, check=False).returncode == 0
