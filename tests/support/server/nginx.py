"""A real nginx before collectors."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.rig import patience
from benchmarks.rig.ports import free_port
from tests.support.integration.tools import need

CONFIG = Path(__file__).resolve().parents[3] / "deploy" / "nginx.conf"


@contextmanager
def proxy(folder: Path, collectors: list[str], config: str = "") -> Iterator[str]:
    """nginx with a configuration, by default the committed one, adapted to local addresses."""
    program = need("nginx", "nginx-light")
    address = f"127.0.0.1:{free_port()}"
    config = (config or CONFIG.read_text()).replace("listen 8321", f"listen {address}")
    for number, url in enumerate(collectors, start=1):
        config = config.replace(f"collector-{number}:8321", url.removeprefix("http://"))
    temp_paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(config.replace("http {", f"http {{ {temp_paths}"))
    directives = f"daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;"
    process = subprocess.Popen(
        [program, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "log", "-g", directives]
    )
    try:
        deadline = time.monotonic() + patience.HANG_S
        while True:
            try:
                httpx.get(f"http://{address}/readyz").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)
