"""The collector: stores the batches of all ranks and reports which rank is slow and why."""

from __future__ import annotations

import sys

from ddpobs_server import signals


def main() -> None:
    """Run the console script; exit with an instruction if the server's packages are not installed."""
    signals.install()  # First of all: the imports take a second, and process 1 loses signals without a handler.
    try:
        from ddpobs_server import app
    except ModuleNotFoundError as error:
        sys.exit(f"ddpobs-server: {error.name} is not installed; install the server with: pip install '.[server]'")
    app.main()
