"""The collector's image, and containers of a Docker engine that end with their block.

`scripts/setup.sh containers` starts the engine and downloads the wheels that the image is built from.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from benchmarks.rig import patience

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".venv" / "wheels"
_INDEX_PORT = 28_321
"""Always the same, because the address is part of the layer that pip makes."""


def docker(*words: str | Path, check: bool = True) -> str:
    """Run a command of Docker and return its two output streams, one after the other.

    Raises:
        RuntimeError: The command failed, and `check` is set.
    """
    ended = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if check and ended.returncode != 0:
        raise RuntimeError(f"docker {' '.join(map(str, words))}: {ended.stdout}\n{ended.stderr}")
    return (ended.stdout + ended.stderr).strip()


def missing(*images: str) -> str:
    """Say what is missing for containers of these images; empty for nothing."""
    try:
        docker("info")
        docker("image", "inspect", *images)
    except (OSError, RuntimeError) as error:
        return f"{error}: run scripts/setup.sh containers"
    return "" if (WHEELS / ".ready").exists() else f"{WHEELS} is missing: run scripts/setup.sh containers"


@contextmanager
def package_index() -> Iterator[str]:
    """Serve the wheels as an index of packages on this machine; yields its address."""

    class Index(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(".whl"):
                return super().do_GET()
            # pip takes those of the project that it asks for.
            page = "".join(f'<a href="/{wheel.name}">{wheel.name}</a>\n' for wheel in WHEELS.glob("*.whl")).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page)
            return None

        def log_message(self, *_: object) -> None:
            """Keep the output short."""

    with ThreadingHTTPServer(("127.0.0.1", _INDEX_PORT), partial(Index, directory=WHEELS)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{_INDEX_PORT}/"
        server.shutdown()


def collector_image() -> str:
    """Build `server/Dockerfile` and return the image's name; it uses the layers of the last build again."""
    tag = f"ddpobs-server:{hashlib.sha256(bytes(ROOT)).hexdigest()[:8]}"
    with (WHEELS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with package_index() as address:
            options = ["--network=host", f"--build-arg=PIP_INDEX_URL={address}", "--label=ddpobs.test=true"]
            # The first stage gets a name too, so that its layers remain.
            docker("build", *options, "--file=server/Dockerfile", "--target=build", f"--tag={tag}-build", ROOT)
            docker("build", *options, "--file=server/Dockerfile", f"--tag={tag}", ROOT)
            docker("image", "prune", "--force", "--filter=label=ddpobs.test=true")
    return tag


@contextmanager
def volume() -> Iterator[str]:
    """Make a volume; yields its name, and removes it with the block."""
    name = docker("volume", "create")
    try:
        yield name
    finally:
        docker("volume", "rm", "--force", name, check=False)


@contextmanager
def container(image: str, *command: str, options: tuple[str, ...] = ()) -> Iterator[str]:
    """Start a container; yields its id, and removes it and its nameless volumes with the block.

    Args:
        image: Its image.
        *command: Its command; that of the image if empty.
        options: Options of `docker run`.
    """
    identity = docker("create", *options, image, *command).splitlines()[0]
    try:
        docker("start", identity)
        yield identity
    finally:
        docker("rm", "--force", "--volumes", identity)


def address(identity: str, port: int = 8321) -> str:
    """Address on this machine of a container's published port."""
    return f"http://{docker('port', identity, str(port)).splitlines()[0]}"


def ready_s(identity: str) -> float:
    """Wait until the collector in a container is ready; returns the seconds of this wait."""
    began = time.monotonic()
    url = address(identity)

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    patience.until(is_ready, lambda: docker("logs", identity), limit_s=120)
    return time.monotonic() - began
