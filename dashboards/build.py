"""Build the Grafana dashboards in `dashboards/grafana/`: `python -m dashboards.build`.

A module of this folder is a dashboard, unless `_SHARED` names it, and has a function of its own name that returns it.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).parent / "grafana"
_SHARED = {"build", "panels", "tables"}


def dashboard_files() -> dict[str, str]:
    """Return the JSON of every dashboard by file name."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    names = sorted({path.stem for path in FOLDER.parent.glob("*.py")} - _SHARED)
    return {f"{name}.json": encoder.encode(_board(name)) + "\n" for name in names}


def _board(name: str) -> object:
    module = import_module(f"dashboards.{name}")
    if not hasattr(module, name):
        raise LookupError(f"dashboards/{name}.py: expected a function {name}() that returns a dashboard, found none")
    return getattr(module, name)().build()


def main() -> None:
    """Write every dashboard, print its path, and delete those that the code has no longer."""
    files = dashboard_files()
    for name, text in files.items():
        json.loads(text)
        (FOLDER / name).write_text(text)
        print(f"dashboards/grafana/{name}")
    for path in FOLDER.glob("*.json"):
        if path.name not in files:
            path.unlink()


if __name__ == "__main__":
    main()
