"""The end of a test that has no Docker engine, and what is read of a container."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.rig.containers import docker, missing
from tests.support.integration.tools import end


def need_images(*images: str) -> None:
    """End the test with the reason unless the engine runs and has these images."""
    if reason := missing(*images):
        end(reason)


def stand_ins(*images: str) -> list[str]:
    """Those of the images that were built of Debian's packages under the names of others."""
    return [name for name in images if "ddpobs.stand-in" in (state(name)["Config"]["Labels"] or {})]


def state(identity: str) -> Any:
    """What Docker records of a container or an image."""
    return json.loads(docker("inspect", identity))[0]


def shell(identity: str, script: str, check: bool = True) -> str:
    """Run a script in a running container; returns its output."""
    return docker("exec", identity, "sh", "-c", script, check=check)
