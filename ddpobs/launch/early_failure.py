"""Report of an error that ends a rank before it has telemetry: at an import, in `init_process_group`, in its data."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress

import zstandard

from ddpobs import wire
from ddpobs.client.reader import page_address
from ddpobs.config import TelemetryConfig, from_environment, resolve
from ddpobs.export.http_sender import Outcome, Sender
from ddpobs.export.spool import Encoded, Spool, folder_of
from ddpobs.launch.lone_event import batch_with_event
from ddpobs.never_raises import never_raises
from ddpobs.recording.error_text import describe
from ddpobs.recording.place.early_place import START, early_run_name, note_joined, rank_of

_GROUP = "init_process_group"


def report(error: BaseException, environ: Mapping[str, str]) -> str:
    """Send an error of this process, a rank by its environment; what does not arrive waits in the spool.

    Args:
        error: The error that ends the process.
        environ: The process's environment, with its rank.

    Returns:
        A line for the terminal; empty if the settings want none.
    """
    config = from_environment(environ)
    run = early_run_name(environ)
    batch = _batch(error, config, run, environ)
    body = zstandard.compress(wire.encode(batch), 1)
    spool, encoded = Spool(folder_of(config.spool), int(config.spool_mb * 1e6)), Encoded(run, batch.source, 0, 1, body)
    with suppress(OSError):  # The launcher may end this process before the response.
        spool.put(encoded, batch.anchor.wall_ns, lambda *_: None)
    sender = Sender(config)
    note_joined(environ)
    response = sender.send(run, batch.source, 0, body, min(config.timeout_s, config.exit_s))
    sender.close()
    if response.outcome not in (Outcome.RETRY, Outcome.FORBIDDEN):
        for spooled in spool.batches({batch.source}):
            spooled.path.unlink(missing_ok=True)
    if config.quiet:
        return ""
    where = "in init_process_group" if batch.events[0].detail["stage"] == _GROUP else "before its model was built"
    is_there = response.outcome in (Outcome.STORED, Outcome.REPEATED)
    address = page_address(config.collector, run) if is_there else f"not reported: {response.detail}"
    return f"ddpobs: rank {batch.rank} failed {where}: {address}"


@never_raises
def report_early(error: BaseException) -> None:
    """Report an error of this rank unless it has telemetry, which reports the error, or wants none."""
    telemetry = sys.modules.get("ddpobs.telemetry")
    if (telemetry is None or not telemetry.was_joined()) and resolve(None, os.environ) is not None:
        text = report(error, os.environ)
        if text:
            print(text, file=sys.stderr, flush=True)  # noqa: T201


def _batch(error: BaseException, config: TelemetryConfig, run: str, environ: Mapping[str, str]) -> wire.Batch:
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    detail = {"stage": _GROUP if _GROUP in functions else START, **describe(error, config.traceback)}
    return batch_with_event(run, rank_of(environ) or (0, 1), environ, pid=os.getpid(), kind="failed", detail=detail)
