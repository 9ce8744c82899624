"""`ddpobs push`: send the batches of a spool."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from ddpobs.cli.app import FAILED, SAVE, WRONG_USE, CollectorOption, fail, main, settings
from ddpobs.cli.progress import progress
from ddpobs.export.http_sender import Outcome, Response, Sender, pause_s
from ddpobs.export.spool import Spool, Spooled
from ddpobs.recovery import recover

_TRIES = 3


@main.command(rich_help_panel=SAVE, short_help="Send the batches of a spool folder.")
def push(folder: Annotated[Path, typer.Argument(metavar="DIR")], collector: CollectorOption = None) -> None:
    """Send the batches of a spool folder: DDPOBS_SPOOL, or ddpobs-spool-UID in the system's temporary folder.

    It also reports the processes that died there, each with its last place.

    Refused batches stay on disk. The exit code is 0 only if the collector accepted every batch.
    """
    if not folder.is_dir():
        fail(f"{folder}: no such folder", WRONG_USE)
    config = settings(collector)
    sender, counts, detail = Sender(config), Counter[Outcome](), ""
    limit_bytes = int(config.spool_mb * 1e6)
    recover(folder, limit_bytes)
    batches = list(Spool(folder, limit_bytes).batches())
    with progress("sending", len(batches)) as advance:
        for batch in batches:
            response = _send(sender, batch)
            counts[response.outcome] += 1
            detail = response.detail or detail
            if response.outcome in (Outcome.STORED, Outcome.REPEATED):
                batch.path.unlink(missing_ok=True)
            elif response.outcome is not Outcome.REFUSED:
                break
            advance(1)
    sender.close()
    stored, repeated, refused = (counts[outcome] for outcome in (Outcome.STORED, Outcome.REPEATED, Outcome.REFUSED))
    remaining = len(batches) - stored - repeated - refused
    typer.echo(f"sent {stored}, repeated {repeated}, refused {refused}, left {remaining}")
    if refused or remaining:
        fail(detail, FAILED)


def _send(sender: Sender, batch: Spooled) -> Response:
    response = Response(Outcome.RETRY)
    for tries in range(_TRIES):
        try:
            body = batch.body()
        except FileNotFoundError:  # Another push, or the training itself, has sent it meanwhile.
            return Response(Outcome.REPEATED)
        except OSError as error:
            return Response(Outcome.REFUSED, f"{batch.path}: {error.strerror}")
        response = sender.send(batch.run, batch.source, batch.seq, body)
        if response.outcome is not Outcome.RETRY:
            break
        if tries + 1 < _TRIES:
            time.sleep(pause_s(tries, response.retry_after_s, random.Random()))
    return response
