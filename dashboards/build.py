"""Builds the Grafana dashboards, committed under `dashboards/grafana/`: run `python -m dashboards.build`."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.collector import collector
from dashboards.run_overview import run_overview

FOLDER = Path(__file__).parent / "grafana"


def built() -> dict[str, str]:
    """File name -> JSON of every dashboard."""
    boards = {"run-overview.json": run_overview(), "collector.json": collector()}
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {name: encoder.encode(board.build()) + "\n" for name, board in boards.items()}


def main() -> None:
    """Write them all."""
    for name, text in built().items():
        json.loads(text)
        (FOLDER / name).write_text(text)
        print(f"dashboards/grafana/{name}")


if __name__ == "__main__":
    main()
