"""Report of the ranks that a `ddpobs run` saw die, or of its command, if that failed before any rank joined.

It sends each rank's spooled batches and its last place. A place stays until the collector has acknowledged it, so that
the next attempt reports it if this process cannot.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import zstandard

from ddpobs import wire
from ddpobs.client.reader import page_address
from ddpobs.config import TelemetryConfig, from_environment
from ddpobs.export.http_sender import Outcome, Response, Sender, pause_s
from ddpobs.export.spool import Encoded, Spool, folder_of
from ddpobs.launch.command_end import command_batch, how_it_ended, last_lines
from ddpobs.ranks.run_name import RANKS
from ddpobs.recording.place.dead_places import Place, places_of_the_dead
from ddpobs.recording.place.place_file import LAUNCH, joined_file, launch_interrupt_ended, process_space
from ddpobs.recovery import encoded
from ddpobs.shared.words import bucket_title

_TRIES = 3


def main(folder: str, launch: str, script: str, status: str, oom_kills: str) -> None:
    """Report the dead ranks of a launch on this host, those that ended first before the others.

    If there are none and none reported itself, it reports the command, once that has failed. The last bytes of the
    command's stderr are on stdin.

    Args:
        folder: Folder of the places.
        launch: Id of the `ddpobs run`.
        script: Name of the command's script.
        status: Exit status of the command, negative for a signal; 0 while it runs.
        oom_kills: Processes that the kernel killed in the cgroup meanwhile.
    """
    config = from_environment(os.environ)
    output = last_lines(sys.stdin.buffer.read()) if config.traceback else ""
    places = [
        place
        for place in places_of_the_dead(Path(folder))
        if (place.identity.launch, place.identity.process_space) == (launch, process_space())
    ]
    for place in filter(_was_interrupted_early, places):
        place.remove()
    places = [place for place in places if not _was_interrupted_early(place)]
    places.sort(key=lambda place: (place.at_wall_ns, place.identity.rank))
    killed = [place for place in places if place.interrupted_ns is None]
    was_reported = joined_file(Path(folder), launch).exists()
    sender, response = Sender(config), Response(Outcome.STORED)
    for place in places:
        response = _send_all(sender, config, place, output if place in killed[:1] else "")
        if response.outcome in (Outcome.RETRY, Outcome.FORBIDDEN):
            break
        place.remove()
        with suppress(OSError):
            joined_file(Path(folder), launch).touch(mode=0o600)
    text = ""
    if killed:
        text = "" if was_reported and all(map(_is_victim, killed)) else line(config, killed, response)
    elif int(status) and not places and _is_own_failure(Path(folder), launch):
        environ = {**os.environ, LAUNCH: launch}
        batch = command_batch(config, environ, script, int(status), int(oom_kills), output)
        text = "" if batch is None else _report_command(sender, config, batch, int(status))
    sender.close()
    if text and not config.quiet:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def _was_interrupted_early(place: Place) -> bool:
    """Whether a person interrupted a rank before its training began: there is no run yet."""
    return bool(place.identity.stage) and (place.interrupted_ns is not None or place.exit_status == -signal.SIGINT)


def _is_own_failure(folder: Path, launch: str) -> bool:
    """Whether no interrupt ended the command, and no rank of another run started it."""
    return RANKS not in os.environ and not launch_interrupt_ended(folder, launch, time.time_ns())


def _is_victim(place: Place) -> bool:
    """Whether a rank without telemetry may have been ended by its launcher, after another rank that was reported."""
    return bool(place.identity.stage) and place.exit_status in (None, -signal.SIGTERM)


def _report_command(sender: Sender, config: TelemetryConfig, batch: wire.Batch, status: int) -> str:
    """Send a command's end, which waits in the spool if it does not arrive; return a line for the terminal."""
    body = zstandard.compress(wire.encode(batch), 1)
    response = sender.send(batch.run, batch.source, 0, body, min(config.timeout_s, config.exit_s))
    where = _where(config, batch.run, response)
    if response.outcome in (Outcome.RETRY, Outcome.FORBIDDEN):
        folder = folder_of(config.spool)
        where = f"not reported: {response.detail}; `ddpobs push {folder}` sends the report"
        with suppress(OSError):
            spool = Spool(folder, int(config.spool_mb * 1e6))
            spool.put(Encoded(batch.run, batch.source, 0, 1, body), batch.anchor.wall_ns, lambda *_: None)
    return f"ddpobs: the command {how_it_ended(status)} before any rank joined: {where}"


def _send_all(sender: Sender, config: TelemetryConfig, place: Place, output: str) -> Response:
    """Send a rank's spooled batches and its place; return the last response, or the first that is not final."""
    spool = Spool(Path(place.path).parents[1], int(config.spool_mb * 1e6))
    for spooled in spool.batches({place.identity.source}):
        batch = Encoded(spooled.run, spooled.source, spooled.seq, spooled.records, spooled.body(), spooled)
        response = _send(sender, batch)
        if response.outcome in (Outcome.RETRY, Outcome.FORBIDDEN):
            return response
        if response.outcome is not Outcome.REFUSED:
            spooled.path.unlink(missing_ok=True)
    return _send(sender, encoded(place, output))


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
    bucket = f", {bucket_title(first.module, first.bucket)}" if first.bucket >= 0 else ""
    phase = first.phase.replace("exposed_comm", "exposed communication")
    where = f"in your loop in step {first.step}" if phase == "other" else f"in {phase} of step {first.step}{bucket}"
    if first.identity.stage:
        where = "before its training began"
    how = how_it_ended(first.exit_status) if first.exit_status else "ended without an error"
    others = f"; then {len(killed) - 1} more" if len(killed) > 1 else ""
    report = _where(config, first.identity.run, response)
    return f"ddpobs: rank {first.identity.rank} {how} {where}{others}: {report}"


def _where(config: TelemetryConfig, run: str, response: Response) -> str:
    """Return the page of the report, or the reason why there is none."""
    if response.outcome is Outcome.FORBIDDEN:
        return f"the collector rejects the token (DDPOBS_TOKEN): {response.detail}"
    if response.outcome is Outcome.RETRY:
        return f"the collector accepts no report, which the next attempt sends: {response.detail}"
    if response.outcome is Outcome.REFUSED:
        return f"the collector refuses the report: {response.detail}"
    return page_address(config.collector, run)
