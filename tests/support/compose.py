"""A compose file started by a real Docker engine, under the names that it gives: ports, volumes, services."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.rig import patience
from benchmarks.rig.containers import WHEELS, collector_image, docker
from benchmarks.rig.training import ROOT
from tests.support.containers import need_images, state
from tests.support.integration.tools import need

TOKEN = "a-token-of-sixteen-characters"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
URL = "http://localhost:8321"
_BUILT_HERE, _WITHOUT_STAND_IN = "python:3.11-slim", "grafana/grafana"


@dataclass
class Stack:
    """Services of a compose file.

    Attributes:
        command: The words of every command, up to the one of compose.
        names: The services that are started: all whose images are there.
    """

    command: list[str]
    names: list[str]

    def compose(self, *words: str) -> str:
        """Run a command of compose; returns its output.

        Raises:
            RuntimeError: It failed.
        """
        environ = os.environ | {"DDPOBS_SERVER_TOKEN": TOKEN, "POSTGRES_PASSWORD": "word"}
        ended = subprocess.run([*self.command, *words], env=environ, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise RuntimeError(f"{words}: {ended.stdout}\n{ended.stderr}")
        return ended.stdout

    def up(self) -> None:
        """Start the services, and wait until each is healthy."""
        self.compose("up", "--detach", *self.names)
        for name in self.names:
            patience.until(lambda name=name: self.state(name)["State"]["Health"]["Status"] == "healthy", self.logs)  # type: ignore[misc]

    def container(self, name: str) -> str:
        """The id of a service's container."""
        return self.compose("ps", "--quiet", name).strip()

    def state(self, name: str) -> Any:
        """What Docker records of a service's container."""
        return state(self.container(name))

    def logs(self) -> str:
        """The last lines of each service."""
        return self.compose("logs", "--no-color", "--tail=40")

    def address(self, name: str, port: int) -> str:
        """Address of a service that is not published, from this machine."""
        (network,) = self.state(name)["NetworkSettings"]["Networks"].values()
        return f"http://{network['IPAddress']}:{port}"

    def value(self, query: str) -> float:
        """The only value of a query in this Prometheus; 0 without one."""
        url = f"{self.address('prometheus', 9090)}/api/v1/query"
        found = httpx.get(url, params={"query": query}).json()["data"]["result"]
        return float(found[0]["value"][1]) if found else 0.0


@contextmanager
def stack(file: str, folder: Path) -> Iterator[Stack]:
    """Start the services of a compose file with the image of this checkout; removes all of them with the block.

    Args:
        file: Path of the compose file in the checkout.
        folder: Folder for the file that names the image.
    """
    services = yaml.safe_load((ROOT / file).read_text())["services"]
    images = {name: service.get("image", _BUILT_HERE) for name, service in services.items()}
    names = [name for name, image in images.items() if not image.startswith(_WITHOUT_STAND_IN)]
    need_images(*(images[name] for name in names))
    built = [name for name, service in services.items() if "build" in service]
    tag = collector_image()
    override = folder / "image.json"
    override.write_text(json.dumps({"services": {name: {"image": tag} for name in built}}))
    has_plugin = docker("compose", "version", "--short", check=False).startswith(("2", "v2", "5", "v5"))
    program = ["docker", "compose"] if has_plugin else [need("docker-compose", "docker-compose")]
    options = ["--project-name", f"ddpobs{secrets.token_hex(4)}", "--file", str(ROOT / file), "--file", str(override)]
    started = Stack([*program, *options], names)
    # Both files publish port 8321: one at a time.
    with (WHEELS / ".compose-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            started.up()
            yield started
        finally:
            started.compose("down", "--volumes", "--timeout=1", "--remove-orphans")
