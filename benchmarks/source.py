"""The measured code and machine: figures of different code or machines must not be combined."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def digest(*parts: str) -> str:
    """Return twelve hex digits of a hash over the Python files in `parts`, relative to the project's folder."""
    content = hashlib.sha256()
    for part in parts:
        path = ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return content.hexdigest()[:12]


def facts(*parts: str, device: str = "cpu") -> dict[str, Any]:
    """Return the facts that figures must share to be combined: the machine, and the code of `parts`."""
    import torch

    processors = [line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    machine = {
        "cores": os.cpu_count(),
        "processor": processors[0].strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":  # Asked of the driver: the ranks are forked, and CUDA does not survive a fork.
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        machine["gpu"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    return {"machine": machine, "code": digest(*parts)}


def resumed(path: Path | None, fresh: dict[str, Any], *, anew: bool = False) -> dict[str, Any]:
    """Return the results in the file, or `fresh` if there is no file or `anew` is set.

    Args:
        path: The file.
        fresh: The facts, with empty results.
        anew: Discard the results in the file.

    Raises:
        SystemExit: The file's facts differ.
    """
    if path is None or anew or not path.exists():
        return fresh
    results: dict[str, Any] = json.loads(path.read_text())
    for fact in ("machine", "code"):
        actual = results.get(fact) if isinstance(results, dict) else None
        if actual != fresh[fact]:
            raise SystemExit(
                f"{path} has figures of another {fact}: expected {fresh[fact]}, got {actual}; name another file, or "
                "start over with --anew"
            )
    return results


def keep(results: dict[str, Any], path: Path | None) -> None:
    """Write the results to the file, completely or not at all."""
    if path:
        path.with_suffix(".part").write_text(json.dumps(results) + "\n")
        path.with_suffix(".part").replace(path)
