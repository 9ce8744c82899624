"""Report of the ranks that a `ddpobs run` saw die: sends each one's spooled batches and its last place.

A place stays until the collector has acknowledged it, so that the next attempt reports it if this process cannot.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from ddpobs.client.reader import page_address
from ddpobs.config import TelemetryConfig, from_environment
from ddpobs.export.http_sender import Outcome, Response, Sender, pause_s
from ddpobs.export.spool import Encoded, Spool
from ddpobs.recording.place.dead_places import Place, places_of_the_dead
from ddpobs.recording.place.place_file import process_space
from ddpobs.recovery import encoded, signal_name
from ddpobs.shared.words import format_bucket

_TRIES = 3


def main(folder: str, launch: str) -> None:
    """Report the dead ranks of a launch on this host, those that ended first before the others.

    Args:
        folder: Folder of the places.
        launch: Id of the `ddpobs run`.
    """
    config = from_environment(os.environ)
    places = [
        place
        for place in places_of_the_dead(Path(folder))
        if (place.identity.launch, place.identity.process_space) == (launch, process_space())
    ]
    places.sort(key=lambda place: (place.at_wall_ns, place.identity.rank))
    sender, response = Sender(config), Response(Outcome.STORED)
    for place in places:
        response = _send_all(sender, config, place)
        if response.outcome in (Outcome.RETRY, Outcome.FORBIDDEN):
            break
        place.remove()
    sender.close()
    killed = [place for place in places if place.interrupted_ns is None]
    if killed and not config.quiet:
        print(line(config, killed, response), file=sys.stderr, flush=True)  # noqa: T201


def _send_all(sender: Sender, config: TelemetryConfig, place: Place) -> Response:
    """Send a rank's spooled batches and its place; return the last response, or the first that is not final."""
    spool = Spool(Path(place.path).parents[1], int(config.spool_mb * 1e6))
    for spooled in spool.batches({place.identity.source}):
        batch = Encoded(spooled.run, spooled.source, spooled.seq, spooled.records, spooled.body(), spooled)
        response = _send(sender, batch)
        if response.outcome in (Outcome.RETRY, Outcome.FORBIDDEN):
            return response
        if response.outcome is not Outcome.REFUSED:
            spooled.path.unlink(missing_ok=True)
    return _send(sender, encoded(place))


def _send(sender: Sender, batch: Encoded) -> Response:
    response = Response(Outcome.RETRY)
    for tries in range(_TRIES):
        response = sender.send(batch.run, batch.source, batch.seq, batch.body)
        if response.outcome is not Outcome.RETRY:
            break
        if tries + 1 < _TRIES:
            time.sleep(pause_s(tries, response.retry_after_s, random.Random()))
    return response


def line(config: TelemetryConfig, killed: list[Place], response: Response) -> str:
    """A line for the terminal: the rank that ended first with its place, and where the report is."""
    first = killed[0]
    bucket = f", {format_bucket(first.module, first.bucket)}" if first.bucket >= 0 else ""
    phase = first.phase.replace("exposed_comm", "exposed communication")
    where = f"in your loop in step {first.step}" if phase == "other" else f"in {phase} of step {first.step}{bucket}"
    how = (
        f"was killed by {signal_name(-status)}" if (status := first.exit_status or 0) < 0 else "ended without an error"
    )
    others = f"; then {len(killed) - 1} more" if len(killed) > 1 else ""
    if response.outcome is Outcome.FORBIDDEN:
        report = f"the collector rejects the token (DDPOBS_TOKEN): {response.detail}"
    elif response.outcome is Outcome.RETRY:
        report = f"the collector accepts no report, which the next attempt sends: {response.detail}"
    else:
        report = page_address(config.collector, first.identity.run)
    return f"ddpobs: rank {first.identity.rank} {how} {where}{others}: {report}"
