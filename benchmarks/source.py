"""Which code was measured, and where: figures of different code or machines are not to be mixed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def digest(*parts: str) -> str:
    """Of the Python files of these files and folders, given relative to the project's: twelve hex digits."""
    found = hashlib.sha256()
    for part in parts:
        path = ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def facts(*parts: str) -> dict[str, Any]:
    """What has to be the same for figures to be taken together: the machine, and the code of these parts."""
    import torch

    named = [line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    machine = {
        "cores": os.cpu_count(),
        "processor": named[0].strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {"machine": machine, "code": digest(*parts)}


def resumed(path: Path | None, fresh: dict[str, Any], *, anew: bool = False) -> dict[str, Any]:
    """What the file holds, to be gone on from; `fresh` where there is none, or it is to be forgotten.

    Args:
        path: The file.
        fresh: Facts, and what nothing measured looks like.
        anew: Forget what the file holds.

    Raises:
        SystemExit: The file's facts are others.
    """
    if path is None or anew or not path.exists():
        return fresh
    kept: dict[str, Any] = json.loads(path.read_text())
    for fact in ("machine", "code"):
        found = kept.get(fact) if isinstance(kept, dict) else None
        if found != fresh[fact]:
            raise SystemExit(
                f"{path} holds figures of another {fact}: expected {fresh[fact]}, got {found}; name another file, or "
                "start over with --anew"
            )
    return kept


def keep(results: dict[str, Any], path: Path | None) -> None:
    """Write results to the file, whole or not at all."""
    if path:
        path.with_suffix(".part").write_text(json.dumps(results) + "\n")
        path.with_suffix(".part").replace(path)
