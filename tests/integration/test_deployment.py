"""Checks of the image and the compose files that need no Docker engine; no container is started."""

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

from benchmarks.rig import patience
from benchmarks.rig.ports import free_port
from benchmarks.rig.training import ROOT
from tests.support.integration.tools import need

COMPOSE = ("docker-compose.yml", "deploy/two-collectors.yml")


def services(name: str) -> dict[str, Any]:
    by_name: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())["services"]
    return by_name


@pytest.mark.parametrize("name", COMPOSE)
def test_a_compose_file_follows_the_specification(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compose = need("docker-compose", "docker-compose")
    monkeypatch.setenv("DDPOBS_SERVER_TOKEN", "a-token")
    monkeypatch.setenv("POSTGRES_PASSWORD", "word")
    checked = subprocess.run([compose, "-f", name, "config"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("name", COMPOSE)
def test_every_service_has_a_health_check_and_is_restarted(name: str) -> None:
    for service, settings in services(name).items():
        assert settings["restart"] == "unless-stopped", service
        # The image that this repository builds has its own health check.
        assert "healthcheck" in settings or "build" in settings, f"{service} has no health check"


@pytest.mark.parametrize("name", COMPOSE)
def test_a_collector_is_not_process_1_of_its_container(name: str) -> None:
    collectors = [settings for settings in services(name).values() if "build" in settings]
    assert collectors
    assert all(settings["init"] is True for settings in collectors)


@pytest.mark.parametrize("name", COMPOSE)
def test_the_files_that_a_compose_file_mounts_and_builds_exist(name: str) -> None:
    folder = (ROOT / name).parent
    for settings in services(name).values():
        for mount in settings.get("volumes", []):
            if mount.startswith("."):
                assert (folder / mount.partition(":")[0]).exists(), mount
        if "build" in settings:
            assert (folder / settings["build"]["context"] / settings["build"]["dockerfile"]).exists()


def test_the_collectors_trust_the_proxy_before_them() -> None:
    by_name = services("deploy/two-collectors.yml")
    address = by_name["proxy"]["networks"]["default"]["ipv4_address"]
    upstreams = re.findall(r"server ([\w-]+):8321", (ROOT / "deploy" / "nginx.conf").read_text())
    assert upstreams == ["collector-1", "collector-2"]
    for upstream in upstreams:
        assert by_name[upstream]["environment"]["DDPOBS_SERVER_TRUSTED_PROXIES"] == address


def test_the_image_runs_without_root_has_a_health_check_and_copies_existing_files() -> None:
    lines = (ROOT / "server" / "Dockerfile").read_text().splitlines()
    last_stage = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM")) :]
    assert [line.split()[1] for line in last_stage if line.startswith("USER")] == ["8321"]
    assert any(line.startswith("HEALTHCHECK") for line in last_stage)
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    not_ignored = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in {name for names in copies for name in names}:
        assert Path(ROOT / source).exists(), source
        assert source in not_ignored


@pytest.mark.parametrize("tls", [False, True])
def test_the_health_check_uses_the_port_and_the_protocol_of_the_settings(tmp_path: Path, tls: bool) -> None:
    settings: dict[str, Any] = {"port": free_port(), "host": "0.0.0.0", "token": "s3cret"}
    if tls:
        arguments = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=elsewhere", "-days", "2"]
        arguments += ["-keyout", "certificate.pem", "-out", "certificate.pem"]
        subprocess.run([need("openssl", "openssl"), *arguments], cwd=tmp_path, check=True, capture_output=True)
        settings["tls_cert"] = tmp_path / "certificate.pem"
    log = (tmp_path / "log").open("wb")
    environ = os.environ | {f"DDPOBS_SERVER_{name.upper()}": str(value) for name, value in settings.items()}
    server = subprocess.Popen(
        [Path(sys.executable).with_name("ddpobs-server")], cwd=tmp_path, env=environ, stdout=log, stderr=log
    )
    try:
        patience.until(lambda: is_healthy(environ))
        assert not is_healthy(environ | {"DDPOBS_SERVER_PORT": str(free_port())})
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def is_healthy(environ: dict[str, str]) -> bool:
    """Whether the image's health check passes in this environment."""
    lines = (ROOT / "server" / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    (words,) = (line.partition(" CMD ")[2] for line in lines if line.startswith("HEALTHCHECK"))
    program, *arguments = json.loads(words)
    assert program == "python"
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, check=False).returncode == 0
