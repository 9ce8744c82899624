"""Which code was measured: figures of different code are not to be mixed."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def digest(*parts: str) -> str:
    """Of the Python files of these files and folders, given relative to the project's: twelve hex digits."""
    found = hashlib.sha256()
    for part in parts:
        path = ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]
