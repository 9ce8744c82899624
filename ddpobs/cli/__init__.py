"""The `ddpobs` command: run a training with telemetry, send a spool, and read the collector's responses."""

from ddpobs.cli import (  # noqa: F401 - each adds its commands
    check_hosts,
    compare,
    export,
    fleet,
    horovodrun,
    import_traces,
    push,
    report,
    run,
    runs,
    stacks,
    trace,
    watch,
    whatif,
)
from ddpobs.cli.app import main

__all__ = ["main"]
