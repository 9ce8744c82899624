"""Build the Grafana dashboards in `dashboards/grafana/`: `python -m dashboards.build`."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.buckets import buckets
from dashboards.collector import collector
from dashboards.fleet import fleet
from dashboards.ranks import ranks
from dashboards.run import run

FOLDER = Path(__file__).parent / "grafana"


def dashboard_files() -> dict[str, str]:
    """Return the JSON of every dashboard by file name."""
    boards = {board.__name__: board() for board in (fleet, run, ranks, buckets, collector)}
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {f"{name}.json": encoder.encode(board.build()) + "\n" for name, board in boards.items()}


def main() -> None:
    """Write every dashboard, and print its path."""
    for name, text in dashboard_files().items():
        json.loads(text)
        (FOLDER / name).write_text(text)
        print(f"dashboards/grafana/{name}")


if __name__ == "__main__":
    main()
