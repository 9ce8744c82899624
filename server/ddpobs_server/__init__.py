"""The collector: takes batches in, keeps them, and says which rank is slow and why."""

from __future__ import annotations

import sys


def main() -> None:
    """Console script; where only the training side is installed it says what is missing."""
    try:
        from ddpobs_server import app
    except ModuleNotFoundError as error:
        sys.exit(f"ddpobs-server: {error.name} is not installed: pip install '.[server]' brings all that it needs")
    app.main()
